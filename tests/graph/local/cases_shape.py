"""Ops that make, move, select or draw elements, with shapes that do not divide evenly."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.graph.local.op_case import F64, Case, aten, bools, case, ints, r


def cases() -> Iterator[Case]:
    """Every case of this kind."""
    for group in (_views, _slices, _lookups, _writes, _factories, _random):
        yield from group()


def _views() -> Iterator[Case]:
    for before, after in (
        ((2, 6, 5), (12, 5)),
        ((12, 5), (2, 6, 5)),
        ((3, 5, 8), (3, 5, 2, 4)),
        ((3, 5, 2, 4), (3, 5, 8)),
        ((4, 6), (6, 4)),
        ((12, 8), (16, 6)),
        ((3, 8), (4, 6)),
        ((6, 4), (24,)),
        ((5, 1, 6), (5, 6)),
        ((6, 10), (4, 15)),
        ((2, 3, 4, 5), (6, 20)),
        ((7,), (7,)),
        ((1,), ()),
    ):
        yield case(aten.view.default, r(*before), list(after), label=f"{before}{after}")
    yield case(aten._unsafe_view.default, r(15, 4), [3, 5, 4])
    yield case(aten.view.default, r(3, 4, 5), [-1, 5], label="minus")
    yield case(aten.transpose.int, r(3, 4, 5), 1, 2)
    yield case(aten.transpose.int, r(3, 4, 5), -1, 0, label="negative")
    yield case(aten.t.default, r(3, 5))
    yield case(aten.permute.default, r(3, 4, 5), [2, 0, 1])
    yield case(aten.movedim.int, r(3, 4, 5), 0, 2)
    yield case(aten.unsqueeze.default, r(3, 5), -1)
    yield case(aten.squeeze.dim, r(3, 1, 5), 1)
    yield case(aten.squeeze.dim, r(3, 2, 5), 1, label="none")
    yield case(aten.squeeze.default, r(2, 1, 3))
    yield case(aten.squeeze.dims, r(2, 1, 3, 1), [1, 3])
    yield case(aten.expand.default, r(3, 1, 5), [2, 3, 4, 5])
    yield case(aten.expand.default, r(1, 5), [3, -1], label="minus")
    yield case(aten.repeat.default, r(3, 5), [2, 3, 1])
    yield case(aten.repeat_interleave.self_int, r(3, 5), 2, 0)
    yield case(aten.view_as_real.default, torch.complex(r(3, 5), r(3, 5)))
    yield case(aten.view_as_complex.default, r(3, 5, 2))


def _slices() -> Iterator[Case]:
    x = r(6, 10)
    yield case(aten.slice.Tensor, x, 1, 0, 5, label="half")
    yield case(aten.slice.Tensor, x, 1, 5, 9223372036854775807, label="other half")
    yield case(aten.slice.Tensor, x, 1, 0, 10, label="full")
    yield case(aten.slice.Tensor, x, 0, 1, -1, label="odd")
    yield case(aten.slice.Tensor, x, 1, 1, 9, 2, label="step")
    yield case(aten.slice.Tensor, x, 0, 0, 1, label="one")
    yield case(aten.slice_backward.default, r(6, 5), [6, 10], 1, 5, 9223372036854775807, 1)
    yield case(aten.slice_backward.default, r(4, 10), [6, 10], 0, 1, 5, 1, label="odd")
    yield case(
        aten.slice_backward.default, r(6, 10), [6, 10], 0, 0, 9223372036854775807, 1, label="full"
    )
    yield case(aten.slice_scatter.default, x, r(6, 3), 1, 2, 5)
    yield case(aten.select.int, r(6, 4, 5), 1, 2)
    yield case(aten.select_backward.default, r(6, 5), [6, 4, 5], 1, 2)
    yield case(aten.select_scatter.default, r(6, 4, 5), r(6, 5), 1, 2)
    yield case(aten.split.Tensor, r(5, 12), 4, 1)
    yield case(aten.split.Tensor, r(5, 12), 5, 1, label="uneven")
    yield case(aten.split_with_sizes.default, r(5, 12), [6, 6], 1)
    yield case(aten.split_with_sizes.default, r(5, 12), [2, 10], 1, label="uneven")
    yield case(aten.unbind.int, r(5, 3), 1)
    yield case(aten.cat.default, [r(5, 3), r(5, 4)], 1)
    yield case(aten.cat.default, [r(5, 3), r(5, 3)], -1, label="equal")
    yield case(aten.stack.default, [r(5, 3), r(5, 3)], 1)
    yield case(aten.constant_pad_nd.default, r(5, 6), [0, 1], 0)
    yield case(aten.constant_pad_nd.default, r(5, 6), [0, 1], -100.0, label="value")
    yield case(aten.flip.default, r(5, 6), [1])
    yield case(aten.roll.default, r(5, 6), [2], [1])
    yield case(aten.roll.default, r(5, 6), [2], label="all")
    yield case(aten.tril.default, r(5, 7), 1)
    yield case(aten.triu.default, r(3, 5, 7), -1)


def _lookups() -> Iterator[Case]:
    ids = ints(7, 4, 3)
    yield case(aten.embedding.default, r(7, 5), ids)
    yield case(aten.embedding.default, r(7, 5), ids, 3, label="padding")
    for padding in (-1, 1, 5, 6):
        some = torch.tensor([0, 1, 5, 5, 6, 4])
        yield case(
            aten.embedding_dense_backward.default,
            r(6, 3),
            some,
            7,
            padding,
            False,
            label=str(padding),
        )
    yield case(
        aten.embedding_dense_backward.default, r(4, 3, 5), ids, 7, -1, True, label="frequency"
    )
    yield case(aten.gather.default, r(5, 7), 1, ints(7, 5, 3))
    yield case(aten.gather.default, r(5, 7), 1, ints(7, 4, 3), label="shorter")
    yield case(aten.gather.default, bools(5, 7), 1, ints(7, 5, 3), label="bool")
    yield case(aten.index_select.default, r(5, 7), 1, ints(7, 4))
    yield case(aten.index.Tensor, r(5, 7), [ints(5, 4, 1), ints(7, 3)], label="both")
    yield case(aten.index.Tensor, r(5, 7, 6), [None, ints(7, 4, 3)], label="middle")
    yield case(aten.index.Tensor, r(5, 7, 6), [ints(5, 4), None, ints(6, 4)], label="apart")
    yield case(aten.index.Tensor, r(5, 7), [ints(5, 4, 3)], label="rows")
    yield case(aten.index.Tensor, r(5, 7), [bools(5)], label="mask")


def _writes() -> Iterator[Case]:
    x = r(5, 7)
    yield case(aten.scatter.src, x, 1, ints(7, 5, 1), r(5, 1))
    yield case(aten.scatter.value, x, 1, ints(7, 5, 3), 2.0)
    yield case(aten.scatter_add.default, x, 1, ints(7, 5, 4), r(5, 4))
    yield case(aten.scatter_reduce.two, x, 1, ints(7, 5, 4), r(5, 4), "amax")
    yield case(aten.index_add.default, x, 0, ints(5, 4), r(4, 7), alpha=2)
    yield case(aten.index_copy.default, x, 0, torch.tensor([3, 1]), r(2, 7))
    for add in (True, False):
        label = "add" if add else "set"
        where = [torch.tensor([[0], [3], [4]]), torch.tensor([2, 5])]
        yield case(aten.index_put.default, x, where, r(3, 2), add, label=label)
        yield case(
            aten.index_put.default, x, [torch.tensor([0, 3, 4])], r(7), add, label=f"rows-{label}"
        )
        # Equal indices are only defined where values are added.
        middle = [None, torch.tensor([0, 3, 6, 6 if add else 5])]
        label = f"middle-{label}"
        yield case(aten.index_put.default, r(5, 7, 3), middle, r(5, 4, 3), add, label=label)


def _factories() -> Iterator[Case]:
    yield case(aten.arange.default, 7)
    yield case(aten.arange.start, 2, 9)
    yield case(aten.arange.start_step, 1, 20, 3)
    yield case(aten.arange.start_step, 0.0, 1.0, 0.15, label="float", dtype=F64)
    yield case(aten.arange.default, 7, label="cast", dtype=F64)
    yield case(aten.zeros.default, [5, 6])
    yield case(aten.ones.default, [5, 6], dtype=F64)
    yield case(aten.full.default, [5, 6], 2.5, dtype=F64)
    yield case(aten.scalar_tensor.default, 2.5, dtype=F64)
    yield case(aten.new_zeros.default, r(3, 2), [5, 6])
    yield case(aten.new_ones.default, r(3, 2), [], dtype=torch.bool)
    yield case(aten.new_full.default, r(3, 2), [5, 6], 2.5)
    yield case(aten.linspace.default, 0, 1, 7, dtype=F64)
    yield case(aten.eye.default, 5, dtype=F64)


def _random() -> Iterator[Case]:
    x = r(5, 6).abs().clamp(max=1)
    yield case(aten.native_dropout.default, x, 0.4, True, exact=True)
    yield case(aten.native_dropout.default, x.t(), 0.4, True, exact=True, label="transposed")
    yield case(aten.native_dropout.default, x, 0.4, False, exact=True, label="eval")
    yield case(aten.native_dropout.default, x, 1.0, True, exact=True, label="all")
    yield case(aten.bernoulli.p, x, 0.3, exact=True)
    yield case(aten.bernoulli.p, x.t(), 0.3, exact=True, label="transposed")
    yield case(aten.bernoulli.default, x, exact=True)
    yield case(aten.rand.default, [5, 6], exact=True)
    yield case(aten.randn.default, [5, 6], exact=True)
    yield case(aten.randint.low, 2, 9, [5, 6], exact=True)
    yield case(aten.rand_like.default, x, exact=True)
    yield case(aten.randn_like.default, x.t(), exact=True, label="transposed")
    yield case(aten.exponential.default, x, exact=True)
    yield case(aten.normal_functional.default, x, exact=True)
    yield case(aten.uniform.default, x, exact=True)
    yield case(aten.randperm.default, 7, exact=True)
