"""Run by `test_on_cuda`, in a process of its own: `compiles` makes the kernels for an H100, `computes` runs them in
Triton's interpreter and compares them with what they stand for."""

import sys

import torch
import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter

from rlinf.engines.transformers import paged_attention, paged_kernels

TYPES = {
    "place": "*i64",
    "turning_row": "i32",
    "fresh_row": "i32",
    "scale": "fp32",
    "table": "*i32",
    "lengths": "*i64",
    "sums": "*fp32",
    "peaks": "*fp32",
    "totals": "*fp32",
}
SHARED = 227 * 1024
"""Bytes that a program may share on an H100."""


def compiled(kernel, dtype, **constants):
    """A kernel for sm_90, of pointers and strides that are multiples of 16, as those of torch's are."""
    kinds = {name: TYPES.get(name, f"*{dtype}") for name in kernel.arg_names} | {"width": "i32"}
    signature = {name: "constexpr" if name in constants else kinds[name] for name in kernel.arg_names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name.endswith("_row")]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3})


def forms(kernel, name, values):
    """In how many forms a kernel would be compiled for these values of an argument."""
    (argument,) = [each for each in kernel.params if each.name == name]
    return len(
        {
            str(native_specialize_impl(BaseBackend, value, False, not argument.do_not_specialize, True))
            for value in values
        }
    )


def compiles():
    assert (
        forms(paged_kernels._attend, "width", [1, 9, 16, 144]) == 1
    )  # the table grows, and no other kernel has to be made
    assert forms(paged_kernels._turn, "turning_row", [1, 9, 16, 144]) == 3
    for dtype, group, size, heads, shares, window in [
        ("bf16", 6, 128, 2, 32, 0),  # Qwen2.5-1.5B
        ("bf16", 7, 128, 4, 1, 0),  # Qwen2.5-7B
        ("fp16", 3, 80, 2, 4, 100),
        ("fp32", 2, 16, 2, 4, 0),
    ]:
        sizes = max(16, triton.next_power_of_2(size))
        more = {"PAGE": 64, "HEADS": heads, "GROUP": group, "WINDOW": window, "GROUPS": 16}
        precision = "ieee" if dtype == "fp32" else "tf32"
        made = compiled(
            paged_kernels._attend, dtype, SIZE=size, SHARES=shares, SIZES=sizes, PRECISION=precision, **more
        )
        assert "cubin" in made.asm
        assert made.metadata.shared < SHARED
        assert made.asm["ptx"].count("cp.async.cg.shared.global") >= 4, (
            "keys and values are not read ahead, 16 bytes each"
        )
        assert "st.local" not in made.asm["ptx"], "registers are spilled"
        assert (
            "cubin"
            in compiled(paged_kernels._turn, dtype, QUERIES=group * heads, HEADS=heads, SIZE=size, SIZES=sizes).asm
        )
        if shares > 1:
            assert "cubin" in compiled(paged_kernels._join, dtype, SIZE=size, SHARES=shares, SIZES=sizes).asm


def computes():
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):  # numpy 2.4 makes no number of an array of one
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patched
    torch.manual_seed(0)
    for dtype, rows, heads, group, size, page, window, programs in [
        (torch.float32, 3, 2, 6, 128, 64, 0, 48),
        (torch.float32, 5, 1, 4, 16, 16, 0, 40),
        (torch.float32, 3, 2, 3, 80, 16, 20, 24),
        (torch.float16, 4, 2, 2, 16, 16, 0, 8),
    ]:
        paged_kernels._PROGRAMS = programs
        keys, values = (torch.randn(page * 40, heads, size).to(dtype) for _ in range(2))
        keys[:page] = values[:page] = torch.nan  # nobody's page is never looked at
        query = torch.randn(rows, heads * group, size).to(dtype)
        table = torch.randint(1, 40, (rows, 6), dtype=torch.int32)
        lengths = torch.randint(0, 6 * page + 1, (rows,))
        lengths[0], lengths[1], table[0] = 0, 6 * page, 0
        asked = (query, keys, values, table, lengths, page, window, size**-0.5)
        expected = paged_attention.paged_attention(*(part.float() for part in asked[:3]), *asked[3:])
        torch.testing.assert_close(
            paged_kernels.paged_attention(*asked).float(),
            expected,
            atol=1e-6 if dtype == torch.float32 else 2e-3,
            rtol=1e-5,
        )
        assert not expected[0].any()
        turns(dtype, rows, heads, group, size)


def turns(dtype, rows, heads, group, size):
    """Queries are rotated, keys and values are where they belong, and nothing else is touched."""
    whole = torch.randn(rows, heads * (group + 2), size).to(dtype)
    turning, fresh = whole.split([heads * (group + 1), heads], dim=1)
    cos, sin = (torch.randn(rows, 1, size).to(dtype) for _ in range(2))
    place = torch.randperm(20)[:rows]
    found, expected = [], []
    for told, turn in ((found, paged_kernels.turn_and_keep), (expected, paged_attention.turn_and_keep)):
        pools = [torch.zeros(20, heads, size, dtype=dtype) for _ in range(2)]
        told += [turn(turning, fresh, cos, sin, place, *pools, heads * group), *pools]
    torch.testing.assert_close(found, expected, atol=1e-6 if dtype == torch.float32 else 5e-3, rtol=1e-5)


if __name__ == "__main__":
    {"compiles": compiles, "computes": computes}[sys.argv[1]]()
