"""What is known of one collective: its arguments, what it returns, means and costs, and its gradient.

Methods take the shape of a member's operand, which member that is, and the arguments in order. `compute` is
the reference: plain differentiable arithmetic on the operands of all members. Which collectives there are
stands in `collective_table.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

Shape = tuple[int, ...]

Call = tuple[Any, ...]
"""One member's call: its operand, then the arguments in order."""

Communicate = Callable[..., Tensor]
"""(name, operand, *arguments) -> the result of another collective of the same group."""


@dataclass(frozen=True)
class GroupMember:
    """Which member of a group, and how many there are."""

    index: int
    count: int


class CollectiveKind(ABC):
    """What is known of one collective.

    arguments: those behind the operand, name -> "int", "ints", "str" or "pairs" (of members). own: the
    arguments that may differ from member to member. one_round: members send straight to each other, so that
    a message waits for no other one. num_listed: where several tensors can go as one collective
    (`ManyCollective`), how many leading arguments each of them has of its own; None where they cannot.
    """

    name: ClassVar[str]
    arguments: ClassVar[Mapping[str, str]]
    own: ClassVar[frozenset[str]] = frozenset()
    one_round: ClassVar[bool] = False
    num_listed: ClassVar[int | None] = None

    @abstractmethod
    def returns(self, shape: Shape, member: GroupMember, *args: Any, **kwargs: Any) -> Shape:
        """The shape of the member's result."""

    @abstractmethod
    def compute(self, calls: Sequence[Call]) -> list[Tensor]:
        """Every member's result, contiguous and in memory of its own."""

    @abstractmethod
    def received(self, shape: Shape, member: GroupMember, *args: Any, **kwargs: Any) -> int:
        """Elements that the member receives, at the rate of its link."""

    @abstractmethod
    def gradient(
        self, communicate: Communicate, grad: Tensor, shape: Shape, member: GroupMember,
        *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """The gradient of the operand from that of the result: the transpose of what all members do.

        Raises `UserError` where the collective is not linear.
        """

    @abstractmethod
    def misfit(self, shapes: Sequence[Shape], rows: Sequence[Call]) -> str:
        """Why members' operands and arguments (equal but for `own`) do not go together, or ""."""

    @property
    def single(self) -> CollectiveKind:
        """This one; of a `ManyCollective` the one that it stands for."""
        return self

    def singles(self, call: Call) -> list[Call]:
        """A call as calls of `single`."""
        return [call]

    def schema(self) -> str:
        """The arguments as the schema of a torch op writes them.

        >>> from hyperparallel.graph.collective_table import collective
        >>> collective("permute").schema()
        'int[] sends, int[] recv_shape, '
        """
        return "".join(f"{_SCHEMA[kind]} {name}, " for name, kind in self.arguments.items())

    def flat(self, args: Sequence[Any]) -> list[Any]:
        """Arguments as a torch op takes them."""
        kinds = zip(args, self.arguments.values(), strict=True)
        # The schema of a torch op knows no list of pairs: they are written one after another.
        return [[i for pair in arg for i in pair] if kind == "pairs" else _plain(arg) for arg, kind in kinds]

    def parsed(self, flat: Sequence[Any]) -> Call:
        """The inverse of `flat`.

        >>> from hyperparallel.graph.collective_table import collective
        >>> collective("permute").parsed([[0, 1, 1, 0], [2]])
        ([(0, 1), (1, 0)], [2])
        """
        kinds = zip(flat, self.arguments.values(), strict=True)
        return tuple(
            list(zip(arg[::2], arg[1::2], strict=True)) if kind == "pairs" else _plain(arg)
            for arg, kind in kinds
        )


_SCHEMA = {"int": "int", "ints": "int[]", "str": "str", "pairs": "int[]"}


def _plain(arg: Any) -> Any:
    return arg if isinstance(arg, (int, str)) else list(arg)


class ManyCollective:
    """One collective of many tensors of one dtype: operand and `num_listed` arguments become lists."""

    def __init__(self, single: CollectiveKind) -> None:
        assert single.num_listed is not None, f"{single.name} takes one tensor"
        self.name, self.single, self._num_lists = f"{single.name}_many", single, single.num_listed + 1

    def singles(self, call: Call) -> list[Call]:
        """A call as one of `single` for each tensor."""
        lists, shared = call[: self._num_lists], call[self._num_lists :]
        return [(*one, *shared) for one in zip(*lists, strict=True)]

    def joined(self, singles: Sequence[Call]) -> Call:
        """The inverse of `singles`: calls that share all but what each tensor has of its own, as one.

        >>> from hyperparallel.graph.collective_table import COLLECTIVES
        >>> COLLECTIVES["all_reduce_many"].joined([("x", "sum", ("dp",)), ("y", "sum", ("dp",))])
        (['x', 'y'], 'sum', ('dp',))
        """
        lists = [list(items) for items in zip(*(one[: self._num_lists] for one in singles), strict=True)]
        return (*lists, *singles[0][self._num_lists :])

    def compute(self, calls: Sequence[Call]) -> list[tuple[Tensor, ...]]:
        """Every member's results."""
        by_tensor = zip(*map(self.singles, calls), strict=True)
        # One tensor at a time over all members, then turned: a row for each member.
        made = [self.single.compute(members) for members in by_tensor]
        return list(zip(*made, strict=True))
