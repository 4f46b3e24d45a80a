"""Calls of device functions and jumps through tables."""

from __future__ import annotations

import pytest

from assembly import launch
from jitmx import arch
from jitmx.errors import SimulationError
from jitmx.sim.launch import simulate
from jitmx.sim.memory import Memory
from jitmx.toolchain import nvrtc

PARAM = """.func (.param .b32 got) twice(.param .b32 given)
{ .reg .b32 %r<4>; .reg .pred %p<2>;
ld.param.b32 %r1, [given]; setp.gt.u32 %p1, %r1, 20; @%p1 bra $big; add.u32 %r2, %r1, %r1; bra $out;
$big: mov.u32 %r2, 7; st.param.b32 [got], %r2; ret;
$out: st.param.b32 [got], %r2; ret; }
"""
REGISTERS = """.func (.reg .b32 got) next(.reg .b32 given) { add.u32 got, given, 1; ret; }
.func nothing() { ret; }
"""
CALL = "{ .param .b32 in; .param .b32 back; st.param.b32 [in+0], r0; call.uni (back), twice, (in);"
CALL += " ld.param.b32 r9, [back+0]; }\n"
OUT = "mul.wide.u32 d0, r0, 4; add.s64 d0, d0, q0; st.global.u32 [d0], r9;"


def result(body: str, declare: str, block: int = 32) -> list[int]:
    memory = Memory()
    out = memory.allocate(4 * block)
    launch("mov.u32 r0, %tid.x; mov.u32 r9, 0;\n" + body + OUT, [out], memory, block=block, declare=declare)
    values: list[int] = memory.download(out, "u4", (block,)).tolist()
    return values


def test_a_function_takes_and_gives_parameters() -> None:
    assert result(CALL, PARAM) == [7 if i > 20 else 2 * i for i in range(32)]


def test_each_call_has_registers_of_its_own() -> None:
    again = CALL.replace("[in+0], r0", "[in+0], r9")
    once = [7 if i > 20 else 2 * i for i in range(32)]
    assert result(CALL + again, PARAM) == [7 if i > 20 else 2 * i for i in once]


def test_registers_may_be_parameters() -> None:
    assert result("call (r9), next, (r0); call (r9), next, (r9); call nothing;\n", REGISTERS) == list(range(2, 34))
    assert result("call (r9), next, (41);\n", REGISTERS) == [42] * 32


def test_a_predicate_may_guard_a_call() -> None:
    body = "setp.lt.u32 p1, r0, 3; @p1 call (r9), next, (r0);\n"
    assert result(body, REGISTERS) == [1, 2, 3] + [0] * 29


@pytest.mark.parametrize(
    ("body", "declare", "message"),
    [
        ("call (r9), absent, (r0);", "", "function absent has no body"),
        ("call (r9), next, (r0, r0);", REGISTERS, "has 1 parameters and 1 results; the call gives 2 and 1"),
        ("call r9, (r0), next;", REGISTERS, "a call through a register is not known"),
        ("call loop;", ".func loop() { call loop; ret; }", "recursion .k → loop → loop. is not known"),
    ],
)
def test_calls_that_cannot_be_followed_are_errors(body: str, declare: str, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        result(body, declare)


TABLE = """$table: .branchtargets $a, $b, $c;
brx.idx r1, $table;
$a: mov.u32 r9, 10; bra $end;
$b: mov.u32 r9, 11; bra $end;
$c: mov.u32 r9, 12;
$end:
"""


def test_threads_jump_through_a_table_each_its_own_way() -> None:
    assert result("rem.u32 r1, r0, 3;\n" + TABLE, "") == [10 + i % 3 for i in range(32)]


def test_a_jump_past_the_table_is_an_error() -> None:
    with pytest.raises(SimulationError, match=r"thread 3: jumps to entry 3 of a table of 3"):
        result("mov.u32 r1, r0;\n" + TABLE, "")


def test_what_the_compiler_makes_of_functions_and_switches() -> None:
    cases = " ".join(f"case {k}: return x * {k + 3} ^ {k * k};" for k in range(9))
    source = f"""
    __device__ __noinline__ unsigned pick(unsigned how, unsigned x) {{ switch (how) {{ {cases} }} return x; }}
    struct Pair {{ unsigned a; float b; }};
    __device__ __noinline__ Pair both(Pair p, int* where) {{ *where = 5; p.a += 3; p.b *= 2.f; return p; }}
    extern "C" __global__ void k(unsigned* out) {{
      int there; const Pair p = both(Pair{{threadIdx.x, 1.5f}}, &there);
      out[threadIdx.x] = pick(threadIdx.x % 11, p.a) + there + (unsigned)p.b;
    }}"""
    ptx = nvrtc.compile_ptx(source, nvrtc.options(arch.parse("sm_90a")))
    assert "call" in ptx
    memory = Memory()
    out = memory.allocate(4 * 64)
    report = simulate(ptx, (1, 1, 1), (64, 1, 1), out.to_bytes(8, "little"), memory)
    want = [((i + 3) * (i % 11 + 3) ^ (i % 11) ** 2 if i % 11 < 9 else i + 3) + 8 for i in range(64)]
    assert memory.download(out, "u4", (64,)).tolist() == want
    assert report.coverage > 0.9
