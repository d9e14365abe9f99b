"""Small random models of the real architectures, as whole Hugging Face folders, and plain forward
passes over them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedulers.view import SeqId
from workers.backends.base import Batch, Segment
from workers.backends.torch_backend import TorchBackend
from workers.loading.files import ModelFiles
from workers.models.registry import read_config
from workers.request import Request, RequestId, SamplingParams
from workers.sequence import Sequence as Seq

VOCAB_SIZE = 320

SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
}


def make_reference(case: str) -> Any:
    """A transformers model with random weights, the same each time."""
    import transformers

    family, options = CASES[case]
    config = getattr(transformers, f"{family}Config")(**{**SHARED, **options})
    torch.manual_seed(len(case))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(model: Any, folder: Path) -> ModelFiles:
    """Write a model as a folder of safetensors and describe it. No tokenizer: ids are enough here."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return ModelFiles(
        name=folder.name,
        folder=folder,
        config=config,
        weight_files=tuple(sorted(folder.glob("*.safetensors"))),
        generation_config={},
        fingerprint="0" * 32,
    )


class Probe:
    """Our model, driven segment by segment, giving the logits of any tokens.

    Blocks of a sequence are dealt out shuffled, so that nothing passes by luck of the layout.
    """

    def __init__(
        self, files: ModelFiles, *, num_blocks: int = 64, block_size: int = 4, **load: Any
    ) -> None:
        self.backend = TorchBackend.load(files, device="cpu", **{"dtype": "float32", **load})
        self.backend.allocate(num_blocks=num_blocks, block_size=block_size)
        self._block_size = block_size
        rng = torch.Generator().manual_seed(1)
        self._blocks: list[int] = torch.randperm(num_blocks, generator=rng).tolist()
        self._captured: list[Tensor] = []
        forward = self.backend._model.forward  # noqa: SLF001

        def capture(step: Any, pool: Any) -> Tensor:
            self._captured.append(forward(step, pool))
            return self._captured[-1]

        self.backend._model.forward = capture  # noqa: SLF001

    def sequence(self, token_ids: Sequence[int]) -> Seq:
        """A sequence that holds blocks for its tokens."""
        seq = Seq(
            SeqId(len(self._blocks)),
            Request(
                request_id=RequestId("probe"),
                prompt_token_ids=list(token_ids),
                sampling=SamplingParams(max_tokens=1),
            ),
            sample_index=0,
            max_model_len=512,
            eos_token_ids=frozenset(),
            find_stop=None,
            arrived_s=0.0,
        )
        seq.coroutine.close()
        return seq

    def table(self, length: int) -> list[int]:
        """Blocks for `length` positions."""
        count = -(-length // self._block_size)
        taken, self._blocks = self._blocks[:count], self._blocks[count:]
        return taken

    def logits(self, *segments: Segment) -> Tensor:
        """Logits of the last token of each segment."""
        self.backend.execute(Batch(tuple(segments)))
        return self._captured[-1]


def config_of(files: ModelFiles) -> Any:
    return read_config(files.config)
