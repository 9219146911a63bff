"""Blocks: units cover the tensor in order, pieces are views that cover the units, where index arithmetic says."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vescale_optim.sharding.blocks import Blocks


def every_kind(shape: tuple[int, ...]) -> list[Blocks]:
    """All constructors that take the shape, with choices that divide and choices that do not."""
    kinds = [
        Blocks.elements(shape),
        Blocks.flat(shape, 5),
        Blocks.rows(shape, 1),
        Blocks.rows(shape, 3),
        Blocks.whole(shape),
    ]
    if len(shape) < 2:
        return kinds
    kinds += [Blocks.tiles(shape, size) for size in (1, 2, 3, 100)]
    for matrix_layout in ("out_in", "in_out"):
        for flatten in (None, "conv"):
            first, second = shape[-2:] if flatten is None else (shape[0], prod(shape[1:]))
            out = first if matrix_layout == "out_in" else second
            choices: list[dict[str, object]] = [{}]
            choices += [
                {"splits": sizes} for sizes in ((out,), (1, out - 1), (out // 2, out // 2)) if sum(sizes) == out
            ]
            choices += [{"interleave": k} for k in (2, 3) if out and out % k == 0]
            for choice in choices:
                if all(size > 0 for size in choice.get("splits", ())):
                    kinds.append(Blocks.matrices(shape, flatten=flatten, matrix_layout=matrix_layout, **choice))
    return kinds


shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@given(shape=shapes, data=st.data())
def test_every_element_is_in_exactly_one_piece_and_writing_reaches_it(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    for blocks in every_kind(shape):
        first = data.draw(st.integers(0, blocks.num_units))
        count = data.draw(st.integers(0, blocks.num_units - first))
        begin, end = blocks.unit_start(first), blocks.unit_start(first + count)
        values = torch.zeros(end - begin)
        for piece in blocks.pieces(values, first, count):
            assert piece.dim() == 3
            piece += 1
        assert values.eq(1).all(), blocks


@given(shape=shapes)
def test_units_tile_the_tensor_in_order(shape: tuple[int, ...]) -> None:
    for blocks in every_kind(shape):
        position = 0
        for unit in range(blocks.num_units):
            assert blocks.unit_start(unit) == position
            assert blocks.unit_numel(unit) > 0
            assert blocks.unit_at(position) == unit
            position += blocks.unit_numel(unit)
            assert blocks.unit_at(position - 1) == unit
        assert position == prod(shape) == blocks.units.numel
        assert blocks.units.boundaries is None or blocks.units.boundaries[-1:] in ((), (position,))


@given(shape=shapes, data=st.data())
def test_any_run_of_units_gives_the_pieces_of_each_unit(shape: tuple[int, ...], data: st.DataObject) -> None:
    for blocks in every_kind(shape):
        first = data.draw(st.integers(0, blocks.num_units))
        count = data.draw(st.integers(0, blocks.num_units - first))
        values = torch.arange(blocks.units.numel)
        begin, end = blocks.unit_start(first), blocks.unit_start(first + count)
        together = [m.tolist() for view in blocks.pieces(values[begin:end], first, count) for m in view]
        apart = []
        for unit in range(first, first + count):
            start = blocks.unit_start(unit)
            views = blocks.pieces(values[start : start + blocks.unit_numel(unit)], unit, 1)
            matrices = [m for view in views for m in view]
            assert tuple(tuple(m.shape) for m in matrices) == blocks.piece_shapes(unit), blocks
            apart += [m.tolist() for m in matrices]
        assert sorted(together) == sorted(apart), blocks


def all_pieces(blocks: Blocks) -> list[list[list[int]]]:
    values = torch.arange(blocks.units.numel)
    return [m.tolist() for view in blocks.pieces(values, 0, blocks.num_units) for m in view]


def expected_matrices(
    shape: tuple[int, ...], out_in: bool, flatten: bool, groups: list[list[int]]
) -> list[list[list[int]]]:
    """By index arithmetic: for every matrix of the stack and every group of out rows, the flat positions (out, in)."""
    if flatten:
        stack, first, second = 1, shape[0], prod(shape[1:])
    else:
        stack, first, second = prod(shape[:-2]), shape[-2], shape[-1]
    num_in = second if out_in else first
    return [
        [[m * first * second + (o * second + i if out_in else i * second + o) for i in range(num_in)] for o in group]
        for m, group in product(range(stack), groups)
    ]


@pytest.mark.parametrize("shape", [(6, 4), (3, 6, 4), (2, 2, 12, 6), (6, 1), (1, 6)])
@pytest.mark.parametrize("matrix_layout", ["out_in", "in_out"])
@pytest.mark.parametrize("flatten", [None, "conv"])
def test_matrices_are_out_by_in_whatever_the_storage(
    shape: tuple[int, ...], matrix_layout: str, flatten: str | None
) -> None:
    out_in = matrix_layout == "out_in"
    first, second = (shape[0], prod(shape[1:])) if flatten else shape[-2:]
    out = first if out_in else second
    choices: list[tuple[dict[str, object], list[list[int]]]] = [({}, [list(range(out))])]
    if out >= 4:
        sizes = (out - 2, 1, 1)
        choices.append(({"splits": sizes}, [list(range(out - 2)), [out - 2], [out - 1]]))
    for k in (2, 3):
        if out % k == 0:
            choices.append(({"interleave": k}, [list(range(j, out, k)) for j in range(k)]))
            size = out // k
            choices.append(({"splits": (size,) * k}, [list(range(j * size, (j + 1) * size)) for j in range(k)]))
    for choice, groups in choices:
        blocks = Blocks.matrices(shape, flatten=flatten, matrix_layout=matrix_layout, **choice)
        assert sorted(all_pieces(blocks)) == sorted(expected_matrices(shape, out_in, bool(flatten), groups)), choice


@pytest.mark.parametrize("shape", [(5, 7), (6, 6), (3, 5, 7), (2, 3, 4, 3), (1, 9), (9, 1)])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_tiles_never_cross_a_matrix(shape: tuple[int, ...], size: int) -> None:
    rows, columns = shape[-2:]
    expected = [
        [
            [m * rows * columns + r * columns + c for c in range(left, min(left + size, columns))]
            for r in range(top, min(top + size, rows))
        ]
        for m in range(prod(shape[:-2]))
        for top in range(0, rows, size)
        for left in range(0, columns, size)
    ]
    blocks = Blocks.tiles(shape, size)
    assert sorted(all_pieces(blocks)) == sorted(expected)
    assert blocks.num_units == prod(shape[:-2]) * -(-rows // size)


@pytest.mark.parametrize(
    ("blocks", "shapes"),
    [
        (Blocks.elements((3, 4)), [(12, 1, 1)]),
        (Blocks.flat((3, 4), 5), [(2, 1, 5), (1, 1, 2)]),
        (Blocks.rows((2, 5, 4), 4), [(2, 4, 4), (1, 2, 4)]),
        (Blocks.rows((7,), 2), [(1, 1, 7)]),
        (Blocks.rows((), 2), [(1, 1, 1)]),
        (Blocks.whole((2, 3, 4)), [(1, 6, 4)]),
        (Blocks.matrices((8, 3, 4)), [(8, 3, 4)]),
        (Blocks.matrices((8, 3, 4), matrix_layout="in_out"), [(8, 4, 3)]),
        (Blocks.matrices((6, 2, 3, 3), flatten="conv"), [(1, 6, 18)]),
        (Blocks.splits((16, 3), (8, 4, 4)), [(1, 8, 3), (2, 4, 3)]),
        (Blocks.splits((12, 3), (4, 4, 4)), [(3, 4, 3)]),
        (Blocks.splits((5, 12, 3), (6, 6)), [(10, 6, 3)]),
        (Blocks.matrices((5, 3, 12), splits=(8, 4), matrix_layout="in_out"), [(5, 8, 3), (5, 4, 3)]),
        (Blocks.matrices((3, 12), splits=(6, 6), matrix_layout="in_out"), [(2, 6, 3)]),
        (Blocks.matrices((12, 3), interleave=2), [(2, 6, 3)]),
        (Blocks.matrices((5, 12, 3), interleave=2), [(5, 6, 3), (5, 6, 3)]),
        (Blocks.tiles((5, 7), 3), [(2, 3, 3), (1, 3, 1), (2, 2, 3), (1, 2, 1)]),
        (Blocks.tiles((4, 6, 3), 3), [(8, 3, 3)]),
    ],
)
def test_equal_pieces_share_one_view(blocks: Blocks, shapes: list[tuple[int, int, int]]) -> None:
    views = blocks.pieces(torch.zeros(blocks.units.numel), 0, blocks.num_units)
    assert [tuple(view.shape) for view in views] == shapes


def test_uneven_splits_of_a_stack_are_units_of_their_own() -> None:
    blocks = Blocks.splits((2, 16, 3), (8, 4, 4))
    assert blocks.units.boundaries == (24, 36, 48, 72, 84, 96)
    assert [blocks.piece_shapes(unit) for unit in range(3)] == [((8, 3),), ((4, 3),), ((4, 3),)]


def test_blocks_are_values() -> None:
    blocks = Blocks.tiles((3, 5, 7), 2)
    assert blocks == pickle.loads(pickle.dumps(blocks)) == copy.deepcopy(blocks)
    assert len({blocks, Blocks.tiles((3, 5, 7), 2), Blocks.tiles((3, 5, 7), 3)}) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Blocks.splits((4608, 1024), (2048, 256, 256)),
            r"shape \(4608, 1024\): splits \(2048, 256, 256\) sum to 2560 rows; give splits that sum to 4608",
        ),
        (lambda: Blocks.splits((4, 6), (4, 0)), r"splits \(4, 0\) of axis 0; give sizes of at least 1"),
        (
            lambda: Blocks.matrices((3, 4, 7), splits=(4, 4), matrix_layout="in_out"),
            r"give splits that sum to 7 \(axis 2\)",
        ),
        (lambda: Blocks.matrices((8,)), r"shape \(8,\): a matrix needs two axes, found 1; use rows, flat or elements"),
        (lambda: Blocks.matrices((9, 4), interleave=2), r"interleave=2 does not divide the 9 out rows \(axis 0\)"),
        (lambda: Blocks.matrices((8, 4), interleave=2, splits=(4, 4)), "both splits and interleave=2; give only one"),
        (lambda: Blocks.matrices((8, 4), matrix_layout="oi"), "matrix_layout='oi'; give 'out_in' or 'in_out'"),
        (lambda: Blocks.matrices((8, 4), flatten="all"), "flatten='all'; give None or 'conv'"),
        (lambda: Blocks.tiles((8,), 4), r"shape \(8,\): a matrix needs two axes"),
        (lambda: Blocks.tiles((8, 4), 0), "tiles of 0; give at least 1"),
        (lambda: Blocks.rows((8, 4), 0), "blocks of 0 rows; give at least 1"),
        (lambda: Blocks.flat((8, 4), 0), "flat blocks of 0 elements; give at least 1"),
        (lambda: Blocks.elements((8, -4)), "axis 1 has -4 elements"),
    ],
)
def test_errors_name_shape_and_way_out(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("values", [torch.zeros(11), torch.zeros(3, 4), torch.zeros(24)[::2]])
def test_pieces_refuse_what_they_could_not_view(values: Tensor) -> None:
    with pytest.raises(ValueError, match="need a flat contiguous tensor of 12 elements"):
        Blocks.rows((3, 4), 1).pieces(values, 0, 3)
    with pytest.raises(IndexError, match="units 2 to 5 of 3"):
        Blocks.rows((3, 4), 1).pieces(values, 2, 3)
