"""The pool of headers: names, digests, relative names, and the ways out of it that are closed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx.errors import ToolchainError
from jitmx.toolchain import headers
from jitmx.toolchain.headers import HeaderPool, directives

Include = Callable[[str, str], Path]


def test_a_digest_is_that_of_the_file_as_it_lies_on_disk(include: Include) -> None:
    path = include("jitmx/a.cuh", '#include "b.cuh"\n')
    include("jitmx/b.cuh", "// b\n")
    assert headers.pool().digest("jitmx/a.cuh") == hashlib.sha256(path.read_bytes()).hexdigest()


def test_cuda_headers_come_from_the_wheel_of_this_python() -> None:
    pool = HeaderPool()
    assert "cuda_fp8.h" in pool
    assert b"__nv_fp8_e4m3" in pool.text("cuda_fp8.h")
    assert any("site-packages" in str(place) or "dist-packages" in str(place) for place in pool.places()[1:])


def test_a_pool_reads_a_file_once_so_that_key_and_code_see_the_same_text(include: Include) -> None:
    path = include("jitmx/a.cuh", "// first\n")
    pool = headers.pool()
    before = pool.digest("jitmx/a.cuh"), pool.text("jitmx/a.cuh")
    path.write_text("// second\n")
    assert (pool.digest("jitmx/a.cuh"), pool.text("jitmx/a.cuh")) == before
    assert HeaderPool(path.parent.parent).digest("jitmx/a.cuh") != before[0]


def test_touching_a_header_does_not_change_its_digest(include: Include) -> None:
    path = include("jitmx/a.cuh", "// a\n")
    before = HeaderPool(path.parent.parent).digest("jitmx/a.cuh")
    os.utime(path, (1, 1))
    assert HeaderPool(path.parent.parent).digest("jitmx/a.cuh") == before


def test_a_relative_include_is_rewritten_to_the_name_that_nvrtc_looks_up(include: Include) -> None:
    include("jitmx/a.cuh", '#pragma once\n#  include "deep/b.cuh" // near\n#include "cuda_bf16.h"\n')
    include("jitmx/deep/b.cuh", '#include "c.cuh"\n')
    include("jitmx/deep/c.cuh", "// c\n")
    pool = headers.pool()
    expected = b'#pragma once\n#  include "jitmx/deep/b.cuh" // near\n#include "cuda_bf16.h"\n'
    assert pool.text("jitmx/a.cuh") == expected
    assert pool.text("jitmx/deep/b.cuh") == b'#include "jitmx/deep/c.cuh"\n'
    assert {"jitmx/deep/b.cuh", "jitmx/deep/c.cuh"} < set(pool.closure('#include "jitmx/a.cuh"\n'))


def test_the_closure_takes_every_branch_and_leaves_out_what_is_nowhere(include: Include) -> None:
    include("jitmx/a.cuh", '#if 0\n#include "jitmx/b.cuh"\n#else\n#include <no_such_header>\n#endif\n')
    include("jitmx/b.cuh", '#include "jitmx/a.cuh"\n')
    include("jitmx/unused.cuh", "")
    pool = headers.pool()
    assert pool.closure('#include "jitmx/a.cuh"\n') == ["jitmx/a.cuh", "jitmx/b.cuh"]
    assert pool.included('#include "jitmx/a.cuh"\n') is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('#if 0\n#endif\n#include "jitmx/b.cuh"\n', True),
        ('#ifdef A\n#include "jitmx/b.cuh"\n#endif\n', False),
        ('#if 0\n#else\n%:include "jitmx/b.cuh"\n#endif\n', False),
        ('# \\\nifndef A\n#include "jitmx/b.cuh"\n#endif\n', False),
        ('/*\n#if 0\n*/\n#include "jitmx/b.cuh"\n/*\n#endif\n*/\n', True),
        ('/*\n#include "jitmx/b.cuh"\n*/\n', False),
        ('#include "jitmx/b.cuh"\n#include "jitmx/gone.cuh"\n', False),
        ('#include "jitmx/b.cuh"\n#include <cuda_fp8.h>\n', False),
    ],
)
def test_what_a_header_includes_is_told_by_text_outside_of_branches_alone(
    include: Include, text: str, told: bool
) -> None:
    include("jitmx/a.cuh", text)
    include("jitmx/b.cuh", "#pragma once\n")
    assert headers.pool().included('#include "jitmx/a.cuh"\n') == (["jitmx/a.cuh", "jitmx/b.cuh"] if told else None)


def test_a_header_that_is_nowhere_is_an_error_that_says_where_it_was_looked_for(include: Include) -> None:
    with pytest.raises(ToolchainError, match=r"no header 'jitmx/no\.cuh' \(looked in: .*include/jitmx.*add templates"):
        headers.pool().text("jitmx/no.cuh")


@pytest.mark.parametrize(
    "name", ["../a.cuh", "jitmx/../../a.cuh", "/etc/hostname", "jitmx/./a.cuh", "", "jitmx", "jitmx/"]
)
def test_no_name_reaches_outside_of_the_pool(include: Include, name: str) -> None:
    include("jitmx/a.cuh", "")
    assert name not in headers.pool()


@pytest.mark.parametrize(
    "text",
    [
        '#include "/tmp/x.h"',
        "#include </tmp/x.h>",
        '  #  include   "/tmp/x.h"',
        '%:include "/tmp/x.h"',
        '#include_next "/tmp/x.h"',
        '#inc\\\nlude "/tmp/x.h"',
        '#inc\\\r\nlude "/tmp/x.h"\r\n',
        '/* a */ # /* b\n c */ include "/tmp/x.h"',
        '#include "../x.h"',
        '#include "jitmx/../../x.h"',
        'const char* a = "/*"; \n#include "/tmp/x.h"',
        'char a = \'"\';\n#include "/tmp/x.h"',
        'const char* a = R"x(" /* )x";\n#include "/tmp/x.h"',
    ],
)
def test_an_include_that_leaves_the_pool_is_refused_however_it_is_written(text: str) -> None:
    with pytest.raises(ToolchainError, match=r"leaves the headers of jitmx and CUDA.*jitmx/x\.h"):
        HeaderPool().closure(f"int before;\n{text}\n")


@pytest.mark.parametrize("text", ["#include HEADER", "#include STRING(a.h)", '#include "a.h" b', "#include"])
def test_an_include_that_does_not_spell_its_header_out_is_refused(text: str) -> None:
    with pytest.raises(ToolchainError, match=r"line 3: #include .*does not spell its header out"):
        HeaderPool().closure(f'#define HEADER "/tmp/x.h"\n\n{text}\n')


@pytest.mark.parametrize(
    "text", ["#if __has_include(<a.h>)", '%:  elif __has_include ( "a.h" )', "#define HAS __has_include"]
)
def test_asking_whether_a_header_exists_is_refused(text: str) -> None:
    with pytest.raises(ToolchainError, match="line 2: __has_include makes the kernel depend on what is installed"):
        HeaderPool().closure(f"\n{text}\n#endif\n")
    assert HeaderPool().closure(f"// {text}\n/*\n{text}\n*/\n") == []


def test_headers_of_jitmx_are_held_to_the_same_rules(include: Include) -> None:
    include("jitmx/a.cuh", '\n#include "/etc/hostname"\n')
    with pytest.raises(ToolchainError, match=r"jitmx/a\.cuh, line 2: #include '/etc/hostname' leaves"):
        headers.pool().closure('#include "jitmx/a.cuh"\n')


def test_what_only_looks_like_a_directive_is_none() -> None:
    text = """
    // #include "/tmp/a.h"
    /* #include "/tmp/b.h"
       #include "/tmp/c.h" */
    const char* s = "#include </tmp/d.h>";
    const char* r = R"(
#include "/tmp/e.h"
    )";
    #define INCLUDE include
    #pragma message("include this")
    int include = 1'000'000;
    """
    assert directives(text, "text") == []


def test_lines_are_counted_through_comments_splices_and_raw_strings() -> None:
    text = '/*\n\n*/ int a; \\\n int b;\nconst char* r = R"(\n\n)";\n#include "a.h"\n# include <b.h> // c\n'
    found = [(each.line, each.name, each.quoted) for each in directives(text, "text")]
    assert found == [(8, "a.h", True), (9, "b.h", False)]


def test_a_header_with_a_nul_byte_is_refused(include: Include) -> None:
    include("jitmx/a.cuh", "int a;\0int b;")
    with pytest.raises(ToolchainError, match="NUL byte"):
        headers.pool().text("jitmx/a.cuh")


def test_a_name_too_long_for_any_file_system_is_a_header_that_is_nowhere(include: Include) -> None:
    name = f"jitmx/{'a' * 5000}.cuh"
    assert headers.pool().closure(f'#include "{name}"\n') == []
    with pytest.raises(ToolchainError, match="there is no header"):
        headers.pool().digest(name)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ToolchainError):
        assert HeaderPool(own=Path("/nowhere"), cuda=()).closure(text) == []


_NAMES = st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8})?\.(h|cuh)", fullmatch=True)
_NOISE = st.sampled_from(
    ["int a;", "// note", "/* b */", "/*\n*/", 'const char* s = "#include";', "#if 0", "#endif", "", "char c = '\\'';"]
)


@given(st.lists(st.tuples(_NOISE, _NAMES, st.booleans())))
def test_every_plain_directive_is_found_whatever_stands_between(parts: list[tuple[str, str, bool]]) -> None:
    text = "".join(
        f"{noise}\n#include {f'{chr(34)}{name}{chr(34)}' if quoted else f'<{name}>'}\n" for noise, name, quoted in parts
    )
    assert [(each.name, each.quoted) for each in directives(text, "text")] == [(name, q) for _, name, q in parts]
    lines = text.split("\n")
    assert all(each.name in lines[each.line - 1] for each in directives(text, "text"))
