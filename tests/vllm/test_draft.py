"""Eagle3 drafts by vLLM's own classes on jitmx's kernels: which layers, what they make, whose head, which tokens."""

# ruff: noqa: E402

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import simulated_card

vllm_world = pytest.importorskip("vllm_world")

from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models.llama import Attention
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

from jitmx import arch, models, settings
from jitmx.cli import main
from jitmx.serving.attention import cached
from jitmx.serving.draft import Argmax, of_draft
from jitmx.toolchain import nvrtc
from jitmx.vllm import hooks, monitor, speculation, warmup
from jitmx.vllm.attention import JitmxAttentionBackend, JitmxAttentionMetadata
from jitmx.vllm.linear import JitmxLinearMethod
from jitmx.vllm.request import requested
from scripts.protocol import drafts
from scripts.protocol.drafts import DraftSizes
from vllm_world import error

SIZES = DraftSizes(
    hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=64, vocab=100, draft_vocab=64, positions=512,
    aux_layers=(0, 1, 2),
)  # fmt: skip
TOKENS = torch.tensor([3, 14, 15, 92, 65])
ALL = {"mxfp4_layers": "moe,qkv,o", "draft_layers": "all"}
OWN = {"draft_layers": "all", "attention": False}


class Causal(torch.nn.Module):
    """In the place of vLLM's attention, which has no kernel here: of one request, from its first token on."""

    def __init__(self, attn: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = attn.num_heads, attn.num_kv_heads, attn.head_dim

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            x.float().view(-1, heads, self.dim).transpose(0, 1)
            for x, heads in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads))
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(0, 1).flatten(1).bfloat16()


@dataclasses.dataclass
class Pair:
    """A target and its draft, as vLLM's runner loads them.

    Attributes:
        speculator: as far as loading the draft looks at it.
    """

    target: Any
    draft: Any
    speculator: Any

    @property
    def config(self) -> Any:
        return self.target.vllm_config

    def methods(self) -> dict[str, Any]:
        """By kind of layer, the method of the draft's."""
        block = self.draft.model.layers[0]
        found = {
            "qkv": block.self_attn.qkv_proj, "o": block.self_attn.o_proj, "gate_up": block.mlp.gate_up_proj,
            "down": block.mlp.down_proj, "fc": self.draft.model.fc, "lm_head": self.draft.lm_head,
        }  # fmt: skip
        return {kind: layer.quant_method for kind, layer in found.items()}

    def served(self) -> dict[str, str]:
        """The format of each that is jitmx's."""
        return {kind: one.format for kind, one in self.methods().items() if isinstance(one, JitmxLinearMethod)}

    def run(self, states: torch.Tensor, tokens: torch.Tensor = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
        """What the draft makes of the target's states [tokens, 3 hidden] behind these tokens: states, and tokens."""
        with vllm_world.world(), torch.no_grad(), set_forward_context(None, self.config, num_tokens=len(tokens)):
            mixed = self.draft.combine_hidden_states(states)
            last, _ = self.draft(tokens.clone(), torch.arange(len(tokens)), mixed)
            return last, self.draft.get_top_tokens(last)


def speculator(config: Any, **changes: Any) -> Any:
    about = {
        "vllm_config": config, "speculative_config": config.speculative_config, "draft_logits": None,
        "draft_watermarker": None, "enable_adaptive_verification": False, "max_num_reqs": 8,
        "use_local_argmax_reduction": False,
    }  # fmt: skip
    return SimpleNamespace(**about | changes)


def load(host: Any, folder: Path, asked: dict[str, Any] | None = None, *, whole: bool = False, **changes: Any) -> Pair:
    """A pair by an engine that is asked for `asked`; attention that is vLLM's needs no kernel.

    Args:
        whole: the target has its weights, too.
        changes: of the speculator.
    """
    method = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 2}
    options = {"additional_config": {"jitmx": ALL if asked is None else asked}, "speculative_config": method}
    target = host.build(load=whole, **options)
    own = speculator(target.vllm_config, **changes)
    with vllm_world.world(), set_current_vllm_config(target.vllm_config):
        draft = EagleSpeculator.load_draft_model(own, target, set())
    attn = draft.model.layers[0].self_attn
    attn.rotary_emb._forward_method = attn.rotary_emb.forward_native
    if attn.attn.attn_backend is not JitmxAttentionBackend:
        attn.attn = Causal(attn)
    return Pair(target, draft, own)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft whose weights MXFP4 holds exactly: quantizing it changes nothing."""
    return drafts.write(tmp_path_factory.mktemp("draft") / "x", SIZES, on_grid=True).folder


@pytest.fixture(autouse=True)
def card() -> Iterator[Any]:
    with simulated_card.on_cpu("sm_90a") as found:
        yield found


def states() -> torch.Tensor:
    return torch.randn(len(TOKENS), 3 * SIZES.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()


def said(host: Any) -> list[tuple[str, str]]:
    return [(level, message) for level, message in host.said if "draft" in message]


def test_nothing_of_a_draft_is_jitmxs_unless_it_is_asked_for(host: Any, folder: Path) -> None:
    pair = load(host, folder, {"mxfp4_layers": "moe,qkv,o"})
    assert pair.served() == {} and not pair.speculator.use_local_argmax_reduction
    assert not any("draft" in name for name in pair.config.additional_config["jitmx_serves"])


@pytest.mark.parametrize(
    ("text", "environ", "wanted"),
    [
        ("fc:mxfp8,lm_head,down", {}, {"fc": "mxfp8", "lm_head": "mxfp4", "down": "mxfp4"}),
        (None, {"JITMX_DRAFT_LAYERS": "qkv,o:mxfp8"}, {"qkv": "mxfp4", "o": "mxfp8"}),
        ("gate_up", {"JITMX_DRAFT_LAYERS": "qkv,o"}, {"gate_up": "mxfp4"}),
    ],
)
def test_the_layers_that_are_asked_for_are_quantized_while_they_are_loaded(
    host: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, text: Any, environ: Any, wanted: dict[str, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings.reload()
    pair = load(host, folder, {"mxfp4_layers": "moe"} | ({} if text is None else {"draft_layers": text}))
    assert pair.served() == wanted
    assert all(isinstance(one, UnquantizedLinearMethod) for kind, one in pair.methods().items()
               if kind not in (*wanted, "lm_head"))  # fmt: skip
    where = "additional_config's draft_layers" if text else "JITMX_DRAFT_LAYERS"
    for kind, format in wanted.items():
        line = f"jitmx serves the draft model's {kind} in {format} on sm_90a (by {where})"
        assert said(host).count(("INFO", line)) == 1
        assert pair.config.additional_config["jitmx_serves"][f"the draft model's {kind}"] == format


def test_a_draft_makes_what_vllm_makes_of_the_same_values(host: Any, folder: Path, card: Any) -> None:
    stock = load(host, folder, {"attention": False}, whole=True)
    wanted, tokens = stock.run(states())
    pair = load(host, folder, OWN, whole=True)
    card.launched.clear()
    found, own = pair.run(states())
    # Of several rows the norm behind attention is a launch of its own, and so is that before the head.
    norms = [kernel for kernel in card.kernels if not kernel.startswith("linear")]
    assert norms == ["norm.concat", "norm.rms", "norm.rms"]
    assert pair.draft.jitmx_norm is not None and stock.draft.jitmx_norm is None
    assert error(pair.draft._normed(found), wanted.double()) < 0.01
    assert pair.speculator.use_local_argmax_reduction and hasattr(pair.draft, "jitmx_targets")
    assert not stock.speculator.use_local_argmax_reduction and not hasattr(stock.draft, "jitmx_targets")
    logits = pair.draft.compute_logits(found)
    assert torch.equal(own, logits.argmax(-1)) and own.dtype == torch.int64
    other = load(host, folder, {"draft_layers": "all:mxfp8", "attention": False}, whole=True)
    assert set(other.served().values()) == {"mxfp8"}
    assert error(other.draft._normed(other.run(states())[0]), wanted.double()) < 0.01
    assert set(own.tolist()) <= set(drafts.proposed(SIZES, 0).tolist()) and (own == tokens).float().mean() >= 0.6


def test_attention_of_a_draft_is_jitmxs_beside_its_layers(host: Any, folder: Path, card: Any) -> None:
    pair = load(host, folder)
    attn = pair.draft.model.layers[0].self_attn.attn
    assert type(attn) is Attention and attn.attn_backend is JitmxAttentionBackend
    assert attn.impl.sinks is None and attn.impl.window is None
    assert (attn.impl.num_heads, attn.impl.num_kv_heads, attn.impl.head_size) == (4, 2, 64)
    context = pair.config.compilation_config.static_forward_context
    assert context[attn.layer_name] is attn and attn.layer_name == "model.layers.2.self_attn.attn"
    line = "jitmx serves the draft model's attention in bfloat16 on sm_90a (by default)"
    assert ("INFO", line) in said(host)


def test_attention_of_a_draft_is_vllms_where_the_targets_is(host: Any, folder: Path) -> None:
    pair = load(host, folder, ALL | {"mxfp4_layers": "moe"})
    assert len(pair.served()) == 6 and isinstance(pair.draft.model.layers[0].self_attn.attn, Causal)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"draft_logits": torch.zeros(1)}, "they are drawn at random (draft_sample_method)"),
        ({"enable_adaptive_verification": True}, "their logits say how sure it is (enable_adaptive_verification)"),
        ({"draft_watermarker": object()}, "they have watermarks"),
    ],
)
def test_tokens_are_taken_of_the_logits_where_these_are_needed(
    host: Any, folder: Path, changes: Any, reason: str
) -> None:
    pair = load(host, folder, **changes)
    assert not pair.speculator.use_local_argmax_reduction
    assert ("INFO", f"vLLM takes the draft model's tokens of its logits: {reason}") in said(host)


def test_a_head_of_the_whole_vocabulary_proposes_its_own_tokens(host: Any, tmp_path: Path) -> None:
    sizes = dataclasses.replace(SIZES, draft_vocab=100)
    pair = load(host, drafts.write(tmp_path / "x", sizes).folder, OWN, whole=True)
    assert pair.draft.draft_id_to_target_id is None
    last, own = pair.run(states())
    assert torch.equal(own, pair.draft.compute_logits(last).argmax(-1))
    assert pair.speculator.use_local_argmax_reduction


def test_rows_of_padding_are_no_tokens(host: Any, tmp_path: Path) -> None:
    # Of a head with 100 rows 28 are padding, whose logits are zeros: larger than any here.
    made = drafts.write(tmp_path / "x", dataclasses.replace(SIZES, draft_vocab=100)).folder
    tensors = load_file(made / "model.safetensors")
    tensors["lm_head.weight"] = -torch.ones_like(tensors["lm_head.weight"])
    save_file(tensors, made / "model.safetensors")
    draft = load(host, made, OWN, whole=True).draft
    assert draft.lm_head.jitmx_packed[0] == 128
    assert draft.get_top_tokens(torch.ones(3, 64, dtype=torch.bfloat16)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.nightly), 5])
def test_norms_and_residuals_of_a_draft_are_in_its_products(host: Any, folder: Path, card: Any, rows: int) -> None:
    found = {}
    for fused in (True, False):
        pair = load(host, folder, OWN | {"fuse_norm": fused}, whole=True)
        (layer,) = pair.draft.model.layers
        assert layer.jitmx_fused is fused and (pair.draft.jitmx_norm is not None) is fused
        card.launched.clear()
        last, tokens = pair.run(states()[:rows], TOKENS[:rows])
        logits = pair.draft.compute_logits(last)
        assert torch.equal(tokens, logits.argmax(-1))
        found[fused] = logits[:, drafts.proposed(SIZES, 0)]
        kernels = [name.partition(".")[0] for name in card.kernels]
        # fc, QKV, O, gate-up, down, and the head twice, of which that for logits never normalises.
        assert kernels.count("linear") == 7 and kernels.count("norm") == ({1: 2, 5: 4}[rows] if fused else 0)
    assert error(found[True], found[False].double()) < 0.02
    line = "jitmx normalises and adds the residual within the products of the draft model on sm_90a"
    assert ("INFO", line) in said(host)


@pytest.mark.parametrize("before", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_draft_compiles_whole_and_makes_the_same(host: Any, tmp_path: Path, card: Any, before: bool) -> None:
    made = drafts.write(tmp_path / "x", SIZES, on_grid=True).folder
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"norm_before_residual": before}))
    pair = load(host, made, OWN, whole=True)
    wanted, _ = pair.run(states())
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    model = pair.draft.model
    pair.draft.model = torch.compile(model, fullgraph=True, dynamic=True, backend=keep)
    card.launched.clear()
    found, _ = pair.run(states())
    assert torch.equal(found, wanted) and model.layers[0].jitmx_keeps is before
    called = [[str(node.target) for node in graph.graph.nodes] for graph in graphs if len(graph.graph.nodes)]
    assert len(called) == 1 and called[0].count("jitmx.rms_norm_concat") == 1
    assert "norm.concat" in card.kernels


@pytest.mark.parametrize("how", ["packed alike", "in bf16", "another"])
def test_a_head_that_repeats_the_targets_is_the_targets(host: Any, checkpoint: Any, tmp_path: Path, how: str) -> None:
    made = drafts.write(tmp_path / "x", dataclasses.replace(SIZES, draft_vocab=100)).folder
    tensors = load_file(made / "model.safetensors")
    tensors["lm_head.weight"] = checkpoint[1]["lm_head.weight"].clone()
    if how == "another":
        tensors["lm_head.weight"][99, 63] += 1
    save_file(tensors, made / "model.safetensors")
    asked = "qkv" if how == "in bf16" else "all"
    pair = load(host, made, {"mxfp4_layers": "moe,lm_head", "draft_layers": asked}, whole=True)
    assert (pair.draft.lm_head is pair.target.lm_head) == (how != "another")


def test_a_draft_without_a_head_takes_the_targets(host: Any, tmp_path: Path) -> None:
    made = drafts.write(tmp_path / "x", dataclasses.replace(SIZES, draft_vocab=100), head=False).folder
    pair = load(host, made, {"mxfp4_layers": "moe,lm_head", "draft_layers": "all"}, whole=True)
    assert pair.draft.lm_head is pair.target.lm_head and pair.speculator.use_local_argmax_reduction


def test_a_draft_without_a_head_has_the_targets_packed_where_that_is_in_bf16(host: Any, tmp_path: Path) -> None:
    made = drafts.write(tmp_path / "x", dataclasses.replace(SIZES, draft_vocab=100), head=False).folder
    pair = load(host, made, OWN | {"mxfp4_layers": "moe"}, whole=True)
    last, tokens = pair.run(states())
    assert pair.draft.lm_head is not pair.target.lm_head and pair.served()["lm_head"] == "mxfp4"
    own = pair.target.lm_head
    assert not isinstance(own.quant_method, JitmxLinearMethod) and own.weight.shape == (128, 64)
    assert torch.equal(tokens, pair.draft.compute_logits(last).argmax(-1))
    left = load(host, made, OWN | {"mxfp4_layers": "moe", "draft_layers": "fc"}, whole=True)
    assert left.draft.lm_head is left.target.lm_head and not left.speculator.use_local_argmax_reduction


def test_where_a_hook_has_moved_the_draft_is_vllms_and_the_target_is_jitmxs(
    host: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hooks.moved(hooks.DRAFT_HOOKS) == [] and len(hooks.DRAFT_HOOKS) > 10
    gone = hooks.Hook("vllm.v1.worker.gpu.spec_decode.eagle.utils", "gone")
    monkeypatch.setattr(hooks, "DRAFT_HOOKS", (*hooks.DRAFT_HOOKS, gone))
    pair = load(host, folder, {"draft_layers": "qkv,o,gate_up,down,fc"})
    assert pair.served() == {} and any("jitmx serves moe" in text for _, text in host.said)
    (line,) = [text for _, text in said(host) if "incompatible" in text]
    assert line.startswith("vLLM serves every layer of a draft model: incompatible vLLM internals: ") and "gone" in line


def test_a_quantized_draft_is_left_to_vllm(host: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jitmx.vllm import draft

    monkeypatch.setattr(draft, "_stock_config", lambda _: SimpleNamespace(get_name=lambda: "fp8"))
    model = host.build(additional_config={"jitmx": ALL}, speculative_config={
        "method": "eagle3", "model": str(folder), "num_speculative_tokens": 1})  # fmt: skip
    assert draft._config(model.vllm_config).get_name() == "fp8"
    line = "vLLM serves the draft model, whose layers jitmx was asked for: its checkpoint is quantized already (fp8)"
    assert ("WARNING", line) in said(host)


@pytest.mark.parametrize(
    ("asked", "vocabulary"), [(ALL, 64), (ALL | {"all_scales": True, "draft_layers": "fc,lm_head:mxfp8"}, 100)]
)
def test_kernels_by_sizes_are_those_that_the_draft_asks_for(
    host: Any, tmp_path: Path, asked: dict[str, Any], vocabulary: int
) -> None:
    made = drafts.write(tmp_path / "x", dataclasses.replace(SIZES, draft_vocab=vocabulary)).folder
    pair = load(host, made, asked)
    model = models.find_draft(str(made))
    assert (model.vocabulary, model.states, model.window) == (vocabulary, 3, 0)
    config, request = pair.config, requested(asked)
    scheduler = config.scheduler_config
    attention = cached(scheduler.max_num_seqs, config.model_config.max_model_len, 16, "same")
    wanted = of_draft(
        model, arch.parse("sm_90"), request.draft, tokens=scheduler.max_num_batched_tokens,
        requests=scheduler.max_num_seqs, all_scales=request.all_scales, attention=attention,
    )  # fmt: skip
    attn = pair.draft.model.layers[0].self_attn.attn
    own = [attn.impl.needed(config, torch.device("cpu"), 16)]
    assert set(host.warmed) | set(own) == set(wanted)
    (argmax,) = [one for one in wanted if isinstance(one, Argmax)]
    assert argmax.n == vocabulary and argmax.normed == ({*request.draft} >= {"o", "gate_up", "down"})


def test_a_cache_that_warmup_filled_serves_a_draft_where_nothing_may_be_compiled(
    host: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITMX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warmup, "_ready", set())
    monkeypatch.setattr(monitor, "_sealed", None)
    settings.reload()
    words = ["--model", str(host.folder), "--layers", "none", "--draft", str(folder), "--draft-layers", "all"]
    words += ["--tokens", "8", "--requests", "2", "--json", "-q"]
    done = CliRunner().invoke(main, ["warmup", "--arch", "sm_90", *words])
    assert done.exit_code == 0, done.output
    kernels = {one["name"] for one in json.loads(done.stdout)["kernels"]}
    monkeypatch.setenv("JITMX_MODE", "required")
    settings.reload()
    for name in ("compile", "scan"):
        monkeypatch.setattr(nvrtc, name, None)
    method = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 2}
    target = host.build(
        speculative_config=method, max_num_batched_tokens=8, max_num_seqs=2, max_model_len=8,
        additional_config={"jitmx": {"draft_layers": "all"}},
    )  # fmt: skip
    monkeypatch.setattr(warmup, "prepare", host.prepare)
    with vllm_world.world(), set_current_vllm_config(target.vllm_config):
        EagleSpeculator.load_draft_model(speculator(target.vllm_config, max_num_reqs=2), target, set())
    assert {one.variant.name for one in warmup._ready} == kernels


STEP = JitmxAttentionMetadata((), torch.zeros(3, dtype=torch.int64), 8)


@pytest.mark.parametrize(
    ("asked", "batches", "shared", "advances", "wanted"),
    [
        ({"draft_layers": "none"}, {"layer": STEP}, 1, True, 4096),
        (ALL, {"layer": STEP, "another": STEP}, 1, True, None),
        (ALL, {"layer": STEP, "another": object()}, 1, True, 3),
        (ALL, {"layer": STEP}, 2, True, 3),
        (ALL, {"layer": STEP}, 1, False, 3),
    ],
    ids=["not served", "by jitmx", "one layer by another", "a context that ranks share", "places that stay"],
)
def test_a_step_of_a_draft_s_graph_finds_no_slots_but_those_that_its_attention_reads(
    host: Any, folder: Path, asked: dict[str, Any], batches: dict[str, Any], shared: int, advances: bool,
    wanted: int | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of 4096 slots a step of three requests looks at three at most; what a graph knows them by stays, and so do
    vLLM's tables. Where it looks at none, no launch writes its number either."""
    pair = load(host, folder, asked)
    slots, told, steps = torch.zeros(2, 4096, dtype=torch.int64), list[tuple[int, int]](), list[int]()

    class Tables:
        slot_mappings, cp_size = slots, shared

        def compute_slot_mappings(self, *given: Any, out: torch.Tensor | None = None) -> torch.Tensor:
            found = slots if out is None else out
            told.append((found.data_ptr(), found.shape[1]))
            return found[:, : given[-1]]

    def drafts_of(self: Any, num_reqs: int, num_tokens_padded: int, attn_metadata: Any, *_: Any) -> None:
        assert self.block_tables.slot_mappings is slots and attn_metadata is batches
        found = self.block_tables.compute_slot_mappings(None, None, None, num_tokens_padded)
        assert found.shape == (2, num_tokens_padded) and found.data_ptr() == slots.data_ptr()
        raise RuntimeError("no draft")

    def step(num_reqs: int, num_tokens_padded: int, attn_metadata: Any, mapping: Any, *rest: Any) -> None:
        assert {name: batch.slot_mapping for name, batch in attn_metadata.items()} == dict.fromkeys(batches)
        assert (num_reqs, num_tokens_padded, mapping, rest) == (3, 3, {}, ("dp", "mode", 2))
        number = own.current_draft_step
        assert number.shape == () and number.dtype == torch.int64 and number.data_ptr() % 16 == 0
        steps.append(int(number))
        raise RuntimeError("no draft")

    monkeypatch.setattr(speculation, "_stock_fused_drafts", drafts_of)
    tables, written, looked_at = Tables(), torch.tensor(0), list[int]()
    own = speculator(
        pair.config, block_tables=tables, advance_draft_positions=advances, current_draft_step=written,
        model=pair.draft, _generate_draft=step,
        _update_draft_decode_metadata=lambda attn_metadata, num_reqs: looked_at.append(num_reqs),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="no draft"):
        TargetDependentARSpeculator._generate_fused_drafts(own, 3, 3, batches, {}, "dp", "mode", 2)
    assert not hooks.moved(hooks.DRAFT_HOOKS)  # of another engine of this process
    assert own.block_tables is tables and own.current_draft_step is written and STEP.slot_mapping is not None
    assert told == ([] if wanted is None else [(slots.data_ptr(), wanted)])
    assert (steps, looked_at) == (([], []) if wanted else ([1], [3]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--draft", "gpt-oss-120b-eagle3"], "name them by --draft-layers"),
        (["--draft-layers", "all"], "name it by --draft"),
        (["--draft-tokens", "2"], "name it by --draft"),
        (
            ["--draft", "nothing", "--draft-layers", "all"],
            "is none of gpt-oss-120b-eagle3, gpt-oss-20b-eagle3-32k",
        ),
        (["--draft", "gpt-oss-120b-eagle3", "--draft-layers", "moe"], "'moe' is none of qkv, o, gate_up, down, fc"),
        (["--draft", "gpt-oss-120b-eagle3", "--draft-layers", "fc", "--ranks", "7"], "7 ranks do not divide"),
    ],
)
def test_warmup_refuses_a_draft_that_cannot_be(words: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["warmup", "--arch", "sm_90", "--model", "gpt-oss-120b", *words])
    assert done.exit_code != 0 and said in done.output + str(done.exception)
