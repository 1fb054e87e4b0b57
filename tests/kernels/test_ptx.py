"""The PTX race check finds stores that may overtake reads on any path, and accepts barriers."""

from __future__ import annotations

import pytest
from ptx import unordered

HEAD = """.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1,
	.param .u64 .ptr .global .align 1 kernel_param_2
)
.reqntid 128
{
	ld.param.b64 %rd1, [kernel_param_0];
	ld.param.b32 %r1, [kernel_param_1];
	ld.param.b64 %rd2, [kernel_param_2];
	mad.wide.s32 %rd3, %r1, 4, %rd1;
	setp.eq.b32 %p1, %r1, 0;
"""
READ = "@%p1 ld.global.b32 { %r2 }, [ %rd3 + 0 ];"
STORE = "@%p1 st.global.b32 [ %rd3 + 0 ], { %r2 };"
ELSEWHERE = "st.global.b32 [ %rd2 + 0 ], { %r2 };"


def found(*lines: str, memory: tuple[int | None, ...] = (7, None, 8)) -> list[str]:
    return unordered(HEAD + "\n".join(lines) + "\nret;\n}\n", memory)


def test_a_store_after_a_read() -> None:
    (sentence,) = found(READ, STORE)
    assert "st.global.b32" in sentence and "lines [13]" in sentence
    assert not found(STORE, READ) and not found(READ, ELSEWHERE) and not found(ELSEWHERE)
    assert not found(READ, "bar.sync \t0;", STORE) and not found(READ, "barrier.sync 1, 128;", STORE)


def test_two_arguments_of_one_storage() -> None:
    assert found(READ, ELSEWHERE, memory=(7, None, 7))


@pytest.mark.parametrize("weak", ["bar.warp.sync -1;", "bar.sync 1, 64;", "@%p1 bar.sync 0;", "membar.gl;"])
def test_partial_barriers_do_not_count(weak: str) -> None:
    assert found(READ, weak, STORE)


def test_paths() -> None:
    around = [READ, "@%p1 bra $L__BB0_1;", "bar.sync 0;", "$L__BB0_1:", STORE]
    assert found(*around), "the branch goes around the barrier"
    assert not found(READ, "@%p1 bra $L__BB0_1;", "$L__BB0_1:", "bar.sync 0;", STORE)
    loop = ["$L__BB0_1:", "bar.sync 0;", STORE, READ, "@%p1 bra $L__BB0_1;"]
    assert not found(*loop)
    assert found("bar.sync 0;", "$L__BB0_1:", STORE, READ, "@%p1 bra $L__BB0_1;"), "the next turn stores"
    assert not found(READ, "bra.uni $L__BB0_1;", STORE, "$L__BB0_1:"), "nothing leads to the store"


def test_labels_of_inline_assembly_have_scopes() -> None:
    wait = ["{", ".reg .pred done;", "wait:", "mbarrier.try_wait.b64 done, [%r1], 0;", "@!done bra.uni wait;", "}"]
    assert found(READ, *wait, STORE, *wait)
    assert not found(READ, *wait, "bar.sync 0;", STORE, *wait)


@pytest.mark.parametrize(
    "read", ["cp.async.cg.shared.global [ %r1 + 0 ], [ %rd3 + 0 ], 16;", "atom.global.add.u32 %r2, [%rd3], 1;"]
)
def test_other_reads(read: str) -> None:
    assert found(read, STORE)


def test_addresses_are_followed_and_values_are_not() -> None:
    moved = [
        "shl.b64 %rd4, %rd9, 2;",
        "add.s64 %rd5, %rd1, %rd4;",
        "mov.b64 %rd6, %rd5;",
        "st.global.b32 [%rd6+4], %r2;",
    ]
    assert found(READ, *moved)
    assert not found(READ, "add.s64 %rd5, %rd2, %rd4;", "ld.global.b64 %rd4, [%rd1];", "st.global.b32 [%rd5], %r2;")
