"""The parameters of the cost model, card by card: what each is, where it comes from, and whether it was fitted."""

from __future__ import annotations

from dataclasses import dataclass, fields

from jitmx.arch import Arch
from jitmx.errors import ArchError


@dataclass(frozen=True)
class Parameter:
    """A number of the model.

    Attributes:
        value: in the unit that the field of `Card` names.
        source: where it comes from, in words.
        fitted: whether it was fitted to measured times (scripts/fit_cost_model.py), rather than measured by itself.
    """

    value: float
    source: str
    fitted: bool = False


@dataclass(frozen=True)
class Card:
    """What the model knows of a card.

    Attributes:
        name: of the card, as its driver says it.
        arch: its target.
        multiprocessors: how many it has.
        groups: of multiprocessors, which clusters lie within, by their sizes.
        clock_ghz: under load, GHz.
        memory_gbps: device memory, read, GB/s.
        block_gbps: what one multiprocessor reads of it with 64 KiB on their way, GB/s.
        port_gbps: what one multiprocessor reads at most, GB/s.
        l2_gbps: the L2, read by all, GB/s.
        mma_tflops: m16n8k16 in bf16, TFLOP/s.
        powers: of two that a multiprocessor makes a cycle.
        wgmma_tflops: warpgroups' products in bf16, TFLOP/s; 0 where there are none.
        launch_us: from a launch to the next that depends on it, where neither does anything, us.
        start_us: how much of that it takes for the blocks of all multiprocessors to begin, and end.
        cluster_us: a hand-over between the blocks of a cluster, us.
        grid_us: a hand-over between all blocks through device memory, us.
        merge_us: the same to the last of some blocks, us.
        l2_mb: of activations that stay in the L2 from one launch to the next, MB.
        alone: warps of a scheduler, with a chain of dependent instructions each, that issue half of what many do.
        fill_us: a dependent trip to memory before the first product, us.
        exchange_gbps: what a block sends to others of its cluster, GB/s.
        exposed_gbps: what a multiprocessor reads of the L2 at the start of a launch, GB/s.
        issued: PTX instructions a cycle and scheduler.
        stacked: part of the products' time that does not pass beside decoding.
        unhidden: part of the lesser of memory's and instructions' times that does not pass beside the greater.
    """

    name: str
    arch: str
    multiprocessors: int
    groups: tuple[int, ...]
    clock_ghz: Parameter
    memory_gbps: Parameter
    block_gbps: Parameter
    port_gbps: Parameter
    l2_gbps: Parameter
    mma_tflops: Parameter
    wgmma_tflops: Parameter
    powers: Parameter
    launch_us: Parameter
    start_us: Parameter
    cluster_us: Parameter
    grid_us: Parameter
    merge_us: Parameter
    l2_mb: Parameter
    alone: Parameter
    fill_us: Parameter
    exchange_gbps: Parameter
    exposed_gbps: Parameter
    issued: Parameter
    stacked: Parameter
    unhidden: Parameter

    def room(self, cluster: int) -> int:
        """Blocks in clusters of so many that it has at a time where each has a multiprocessor."""
        return sum(group // cluster * cluster for group in self.groups)

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Its parameters by name."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Parameter)}


_LOG = "docs/perf-log.md"
_ASSUMED = "assumed to be that of an H200"


def _fitted(value: float) -> Parameter:
    return Parameter(value, "fitted: scripts/fit_cost_model.py", True)


H200 = Card(
    name="NVIDIA H200",
    arch="sm_90a",
    multiprocessors=132,
    # docs/perf-log.md, attention.decode: one of them has fewer than 16. Sizes of the others are not known one by one.
    groups=(18, 18, 18, 16, 16, 16, 16, 14),
    clock_ghz=Parameter(1.75, f"{_LOG}, linear.stream: 1.71 to 1.86 GHz by clock64 against graph time"),
    memory_gbps=Parameter(4200.0, f"{_LOG}: reads of the runs, 3.98 to 4.25 TB/s; attention's reach 4.48"),
    block_gbps=Parameter(
        46.0, f"{_LOG}, attention.decode: 2.95 TB/s by 64 multiprocessors, 64 KiB on their way in each"
    ),
    port_gbps=Parameter(112.0, "64 bytes a cycle at the clock above"),
    l2_gbps=Parameter(4900.0, f"{_LOG}, sampling.greedy: 3.7 TB/s of 16 rows, 5.3 of 64"),
    l2_mb=Parameter(40.0, "50 MB, of which weights that pass take some"),
    mma_tflops=Parameter(620.0, f"{_LOG}, linear.tile: 605 to 635 by m16n8k16 alone"),
    wgmma_tflops=Parameter(758.0, f"{_LOG}: large bf16 products of cuBLAS, 758 to 774"),
    powers=Parameter(16.0, "CUDA C++ Programming Guide, throughput of arithmetic instructions"),
    launch_us=Parameter(0.69, f"{_LOG}, linear.stream: a chain of launches that do nothing"),
    merge_us=Parameter(1.3, f"{_LOG}, attention.decode: what the merge of a grid costs"),
    exchange_gbps=Parameter(24.5, f"{_LOG}, linear.wgmma and linear.splitk: 12 to 14 bytes a cycle, 24 at best"),
    stacked=Parameter(0.5, f"{_LOG}, linear.wgmma: an HGMMA leaves the scheduler half of its cycles"),
    start_us=_fitted(0.2099),
    cluster_us=_fitted(0.3823),
    grid_us=_fitted(2.81),
    fill_us=_fitted(0.5728),
    exposed_gbps=_fitted(107.2),
    issued=_fitted(1.099),
    alone=_fitted(1.036),
    unhidden=_fitted(0.04254),
)


def _of_gb10(name: str, unit: float = 1.0) -> Parameter:
    return Parameter(H200.parameters[name].value * unit, _ASSUMED)


# What a cycle moves is that of an H200, at another clock.
_FASTER = 2.4 / H200.clock_ghz.value

GB10 = Card(
    name="NVIDIA GB10",
    arch="sm_121a",
    multiprocessors=48,
    groups=(16, 16, 16),  # assumed
    clock_ghz=Parameter(2.4, "published boost clock"),
    memory_gbps=Parameter(240.0, "227 to 246 GB/s measured by others; 273 nominal"),
    block_gbps=_of_gb10("block_gbps"),
    port_gbps=_of_gb10("port_gbps", _FASTER),
    l2_gbps=_of_gb10("l2_gbps", _FASTER * 48 / 132),
    l2_mb=Parameter(18.0, "24 MB, of which weights that pass take some"),
    mma_tflops=Parameter(118.0, "m16n8k16 in 16 cycles, as published for this generation, at the clock above"),
    wgmma_tflops=Parameter(0.0, "it has none"),
    powers=Parameter(16.0, "CUDA C++ Programming Guide, throughput of arithmetic instructions"),
    launch_us=_of_gb10("launch_us"),
    start_us=_of_gb10("start_us"),
    merge_us=_of_gb10("merge_us"),
    exchange_gbps=_of_gb10("exchange_gbps", _FASTER),
    stacked=_of_gb10("stacked"),
    cluster_us=_of_gb10("cluster_us"),
    grid_us=_of_gb10("grid_us"),
    fill_us=_of_gb10("fill_us"),
    exposed_gbps=_of_gb10("exposed_gbps", _FASTER),
    issued=_of_gb10("issued"),
    alone=_of_gb10("alone"),
    unhidden=_of_gb10("unhidden"),
)

CARDS = {card.arch: card for card in (H200, GB10)}


def of(arch: Arch) -> Card:
    """The card that a target stands for.

    Raises:
        ArchError: no card of the target has parameters.
    """
    if arch.name not in CARDS:
        listed = ", ".join(f"{name} ({card.name})" for name, card in CARDS.items())
        raise ArchError(f"the cost model has no parameters for {arch}", f"it has them for {listed}")
    return CARDS[arch.name]
