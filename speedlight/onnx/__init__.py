"""ONNX's Attention, RotaryEmbedding and TensorScatter, and ONNX Runtime's GroupQueryAttention, computed here: for its
reference evaluator, and as a backend.

>>> import numpy as np, onnx.helper, onnx.reference, speedlight.onnx
>>> node = onnx.helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=1)
>>> q = np.ones((1, 8, 16, 64), np.float32)
>>> speedlight.onnx.run_node(node, [q, q, q])[0].shape
(1, 8, 16, 64)

The module is a backend as `onnx.backend.test.BackendTest(speedlight.onnx, __name__)` takes one. Every node that is not
one of `OPS` is computed by onnx.reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..adapting import not_installed

try:
    from onnx import ModelProto, NodeProto
except ModuleNotFoundError as error:
    raise not_installed(__name__, error) from None
from onnx.defs import onnx_opset_version
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from .. import ArgumentError
from .grouped import GroupQueryAttention
from .operators import Attention, RotaryEmbedding, TensorScatter

__all__ = [
    "OPS",
    "Attention",
    "GroupQueryAttention",
    "Prepared",
    "RotaryEmbedding",
    "TensorScatter",
    "is_compatible",
    "prepare",
    "run_model",
    "run_node",
    "supports_device",
]

OPS: list[type[OpRun]] = [Attention, GroupQueryAttention, RotaryEmbedding, TensorScatter]
"""What `onnx.reference.ReferenceEvaluator(model, new_ops=speedlight.onnx.OPS)` computes here."""

_FIRST = {"Attention": 23, "RotaryEmbedding": 23, "TensorScatter": 24}  # opsets


class Prepared:
    """A model whose nodes of `OPS` are computed here.

    >>> import numpy as np, onnx.helper as h, speedlight.onnx
    >>> q, k, v, y = (h.make_tensor_value_info(n, 1, [1, 2, 3, 4]) for n in "qkvy")
    >>> graph = h.make_graph([h.make_node("Attention", ["q", "k", "v"], ["y"])], "one", [q, k, v], [y])
    >>> model = speedlight.onnx.prepare(h.make_model(graph, opset_imports=[h.make_opsetid("", 23)]))
    >>> [y] = model.run([np.ones((1, 2, 3, 4), np.float32)] * 3)
    >>> y.shape
    (1, 2, 3, 4)
    """

    __slots__ = ("evaluator",)

    def __init__(self, model: ModelProto) -> None:
        _check_opset(model)
        self.evaluator = ReferenceEvaluator(model, new_ops=OPS)

    def run(self, inputs: Sequence[np.ndarray] | dict[str, np.ndarray]) -> list[Any]:
        """Computes every output of the graph; inputs in its order, or by name."""
        if isinstance(inputs, dict):
            return list(self.evaluator.run(None, inputs))
        names = [str(x) for x in self.evaluator.input_names]
        if len(inputs) > len(names):
            raise ArgumentError(f"inputs: expected {len(names)}, {names}; got {len(inputs)}.")
        return list(self.evaluator.run(None, dict(zip(names, inputs, strict=False))))


def _check_opset(model: ModelProto) -> None:
    """Raises unless operators are of an opset that has them."""
    version = max([x.version for x in model.opset_import if x.domain in ("", "ai.onnx")], default=onnx_opset_version())
    used = {node.op_type for node in model.graph.node if node.domain in ("", "ai.onnx")}
    for name, first in _FIRST.items():
        if name in used and version < first:
            raise ArgumentError(f"model: expected opset {first} or later, which has {name}; got {version}.")


def prepare(model: ModelProto, device: str = "CPU") -> Prepared:
    """Makes a model ready to run(): onnx.backend's prepare().

    >>> import onnx.helper as h, speedlight.onnx
    >>> graph = h.make_graph([h.make_node("Identity", ["x"], ["y"])], "none", [h.make_tensor_value_info("x", 1, [2])],
    ...     [h.make_tensor_value_info("y", 1, [2])])
    >>> import numpy as np
    >>> speedlight.onnx.prepare(h.make_model(graph)).run([np.ones(2, np.float32)])[0].tolist()
    [1.0, 1.0]
    """
    if not supports_device(device):
        raise ArgumentError(f"device: expected 'CPU'; got {device!r}.")
    return Prepared(model)


def run_model(model: ModelProto, inputs: Sequence[np.ndarray], device: str = "CPU") -> list[Any]:
    """Runs prepare(model).run(inputs).

    >>> import numpy as np, onnx.helper as h, speedlight.onnx
    >>> graph = h.make_graph([h.make_node("Neg", ["x"], ["y"])], "one", [h.make_tensor_value_info("x", 1, [2])],
    ...     [h.make_tensor_value_info("y", 1, [2])])
    >>> speedlight.onnx.run_model(h.make_model(graph), [np.ones(2, np.float32)])[0].tolist()
    [-1.0, -1.0]
    """
    return prepare(model, device).run(inputs)


def run_node(node: NodeProto, inputs: Sequence[np.ndarray | None], device: str = "CPU") -> list[Any]:
    """Computes one node's outputs, of the newest opset; inputs in its order, None for those that it leaves out ("").

    >>> import numpy as np, onnx.helper, speedlight.onnx
    >>> node = onnx.helper.make_node("TensorScatter", ["past", "update"], ["present"])
    >>> speedlight.onnx.run_node(node, [np.zeros((1, 3, 1)), np.ones((1, 2, 1))])[0].ravel().tolist()
    [1.0, 1.0, 0.0]
    """
    if not supports_device(device):
        raise ArgumentError(f"device: expected 'CPU'; got {device!r}.")
    feeds = {name: x for name, x in zip(node.input, inputs, strict=True) if name and x is not None}
    evaluator = ReferenceEvaluator(node, opsets={"": onnx_opset_version()}, new_ops=OPS)
    return list(evaluator.run(None, feeds))


def supports_device(device: str) -> bool:
    """Returns whether models run there: on the CPU.

    >>> import speedlight.onnx
    >>> speedlight.onnx.supports_device("CPU"), speedlight.onnx.supports_device("CUDA:0")
    (True, False)
    """
    return isinstance(device, str) and device.split(":")[0].upper() == "CPU"


def is_compatible(model: ModelProto) -> bool:
    """Returns whether the model can be prepared: what is not of `OPS`, onnx.reference computes.

    >>> import onnx, speedlight.onnx
    >>> speedlight.onnx.is_compatible(onnx.ModelProto())
    True
    """
    return isinstance(model, ModelProto)
