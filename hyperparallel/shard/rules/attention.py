"""Rules of fused attention (scaled_dot_product_attention) on CPU and CUDA, forward and backward.

q is b h s e, k is b g t e, v is b g t f, the result b h s f. Batch and heads are free. The query
sequence s may be cut unless the mask is implied by position (`is_causal`) or numbers are drawn
(dropout); gradients of k and v are then pending sums. The key sequence t and the head sizes e, f
are blocked. With grouped heads, h = (g r): cutting g keeps each group together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hyperparallel.shard.rules.notation import Shape
from hyperparallel.shard.rules.operands import (
    Builder,
    OpValues,
    along,
    argument,
    empty_of,
    in_shapes,
    out_shapes,
)
from hyperparallel.shard.rules.rule import FactorDims, OpFacts, Rule
from hyperparallel.workload.ops import Op, Ref


class _Sides:
    """Factors of the operands of one attention op, from the shapes of q, k and v."""

    def __init__(self, q: Shape, k: Shape, v: Shape, causal: bool, dropout: float) -> None:
        heads, groups = q[1], k[1]
        sizes = {"b": q[0], "s": q[2], "t": k[2], "e": q[3], "f": v[3]}
        query_heads: tuple[str, ...] = ("h",)
        key_heads: tuple[str, ...] = ("h",)
        if heads == groups:
            sizes["h"] = heads
        # Grouped heads: a cut of g keeps queries with the keys that they read.
        elif groups and heads % groups == 0 and v[1] == groups:
            query_heads, key_heads = ("g", "r"), ("g",)
            sizes |= {"g": groups, "r": heads // groups}
        else:
            # Heads that do not pair up: whatever the kernel makes of them, it gets all of them.
            query_heads, key_heads = ("q_heads",), ("k_heads",)
            sizes |= {"q_heads": heads, "k_heads": groups}
        blocked = {"t", "e", "f", "q_heads", "k_heads"}
        if causal or dropout:
            # A causal mask counts rows from the first that the kernel sees, and dropout draws by place.
            blocked.add("s")
        if dropout:
            # The kernel draws by its own tensor's places: a piece would drop other weights than the whole.
            blocked |= {"b", "h", "g", "r"}
        self.sizes = {name: size for name, size in sizes.items() if size != 1}
        self.blocked = frozenset(blocked & set(self.sizes)) | empty_of(self.sizes)
        self.heads = query_heads
        self.q = self.dims(("b",), query_heads, ("s",), ("e",))
        self.k = self.dims(("b",), key_heads, ("t",), ("e",))
        self.v = self.dims(("b",), key_heads, ("t",), ("f",))
        self.out = self.dims(("b",), query_heads, ("s",), ("f",))
        self.rows = self.dims(("b",), query_heads, ("s",))

    def dims(self, *dims: tuple[str, ...]) -> FactorDims:
        return tuple(tuple(name for name in dim if name in self.sizes) for dim in dims)

    def bias(self, shape: Shape) -> FactorDims:
        """A mask or bias, which broadcasts against b h s t."""
        full = self.dims(("b",), self.heads, ("s",), ("t",))[4 - len(shape) :]
        return tuple(() if size == 1 else dim for dim, size in zip(full, shape, strict=True))

    def statistics(self, shape: Shape) -> FactorDims:
        """Log-sum-exp per row, b h s and perhaps a last dim of one.

        Some kernels pad its rows: those are then blocked, and so is s.
        """
        rest = ((),) * (len(shape) - 3)
        if len(shape) < 3:
            return tuple(() for _ in shape)
        if shape[2] == self.sizes.get("s", 1):
            return self.rows + rest
        # A piece would be padded to another length than its share of the whole.
        self.sizes["padded"] = shape[2]
        self.blocked |= {"padded"} | ({"s"} & set(self.sizes))
        return (*self.rows[:2], ("padded",), *rest)

    def opaque(self, shape: Shape, name: str) -> FactorDims:
        """What a kernel keeps for its backward (a random state): whole, whatever is cut."""
        dims, sizes = along(shape, tuple(f"{name}{i}" for i in range(len(shape))))
        self.sizes |= sizes
        self.blocked |= frozenset(sizes)
        return dims

    def rule(
        self,
        inputs: Sequence[FactorDims],
        outputs: Sequence[FactorDims | None],
        linear: tuple[tuple[int, ...], ...],
        kept: bool = False,
    ) -> Rule:
        inside = dict.fromkeys(self.sizes, 0.0) if kept else None
        return Rule(
            tuple(inputs), tuple(outputs), self.sizes, self.blocked, linear=linear, inside=inside
        )


def _forward(dropout_at: int, causal_at: int, weights: bool = False) -> Builder:
    """(q, k, v, [bias], dropout, causal) -> out, log-sum-exp, what the kernel keeps for itself.

    weights: the second result is the attention weights, b h s t.
    """

    def build(op: Op, values: OpValues) -> Rule:
        shapes = in_shapes(op, values)
        causal = bool(argument(op, causal_at, "is_causal", False))
        dropout = float(argument(op, dropout_at, "dropout_p", 0.0))
        sides = _Sides(shapes[0], shapes[1], shapes[2], causal, dropout)
        inputs = [sides.q, sides.k, sides.v]
        inputs += [sides.bias(shape) for shape in shapes[3:]]
        results = out_shapes(op, values)
        outputs: list[FactorDims | None] = [sides.out]
        for shape in results[1:2]:
            rows = sides.bias if weights else sides.statistics
            outputs.append(None if shape is None else rows(shape))
        outputs += [
            None if s is None else sides.opaque(s, f"z{i}_") for i, s in enumerate(results[2:])
        ]
        # softmax(q k) v is linear in v alone; the statistics are not, if anybody wants them.
        linear = ((2,),) if not dropout and not any(op.outputs[1:]) else ()
        return sides.rule(inputs, outputs, linear, kept=len(results) > 2)

    return build


def _backward(order: str, dropout_at: int, causal_at: int, mask_last: bool = False) -> Builder:
    """Backward: `order` names the tensor arguments in the order in which they stand.

    g: gradient of out; q k v; m: mask or bias; o: out; l: log-sum-exp; x: anything the forward
    kernel kept for itself, taken as it is. A mask given by keyword stands last (`mask_last`).
    """

    def build(op: Op, values: OpValues) -> Rule:
        tensors = [arg for arg in op.args if isinstance(arg, Ref)]
        tensors += [arg for arg in op.kwargs.values() if isinstance(arg, Ref)]
        letters = _present(op, order, mask_last)
        shapes = {
            c: values[t.name].shape for c, t in zip(letters, tensors, strict=True) if c != "x"
        }
        causal = bool(argument(op, causal_at, "is_causal", False))
        dropout = float(argument(op, dropout_at, "dropout_p", 0.0))
        sides = _Sides(shapes["q"], shapes["k"], shapes["v"], causal, dropout)
        rows = sides.statistics(shapes["l"])
        known: dict[str, FactorDims] = {
            "g": sides.out, "q": sides.q, "k": sides.k, "v": sides.v, "o": sides.out, "l": rows
        }  # fmt: skip
        inputs = []
        for letter, tensor in zip(letters, tensors, strict=True):
            if letter == "m":
                inputs.append(sides.bias(shapes["m"]))
            elif letter == "x":
                inputs.append(sides.opaque(values[tensor.name].shape, f"z{len(inputs)}_"))
            else:
                inputs.append(known[letter])
        outputs: list[FactorDims | None] = [sides.q, sides.k, sides.v]
        if len(op.outputs) > 3:
            outputs.append(sides.bias(shapes["m"]) if "m" in shapes else None)
        return sides.rule(inputs, outputs, ())

    return build


def _present(op: Op, order: str, mask_last: bool) -> str:
    """`order` without the letters whose arguments are not tensors."""
    letters = "".join(c for c, arg in zip(order, op.args, strict=False) if isinstance(arg, Ref))
    keyword = isinstance(op.kwargs.get("attn_mask"), Ref)
    return letters + ("m" if mask_last and keyword else "")


RULES: dict[str, Builder] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _forward(3, 4),
    "aten._scaled_dot_product_flash_attention": _forward(3, 4),
    "aten._scaled_dot_product_efficient_attention": _forward(5, 6),
    "aten._scaled_dot_product_cudnn_attention": _forward(5, 6),
    "aten._scaled_dot_product_fused_attention_overrideable": _forward(4, 5),
    "aten._scaled_dot_product_attention_math": _forward(4, 5, weights=True),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _backward(
        "gqkvol", 6, 7, mask_last=True
    ),
    "aten._scaled_dot_product_flash_attention_backward": _backward("gqkvolxx----xx", 10, 11),
    "aten._scaled_dot_product_efficient_attention_backward": _backward("gqkvmolxx", 9, 11),
    "aten._scaled_dot_product_cudnn_attention_backward": _backward("gqkvolxxmxx", 13, 14),
}

# Two products, each over b h s t and one of the two head sizes, which are equal in nearly every model: f is
# left out. The backward has five: the scores once more, and the gradients of v, of the scores, q and k.
_FORWARD = OpFacts(flops=4.0, not_looped=("f",), group="attention")
FACTS: dict[str, OpFacts] = {
    name: replace(_FORWARD, flops=10.0) if name.endswith("_backward") else _FORWARD for name in RULES
}
