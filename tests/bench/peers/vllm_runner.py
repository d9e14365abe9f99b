"""vLLM on the CPU, compiled, in the process that the benchmark starts in vLLM's environment.

For a job whose start-up counts it runs uncompiled: that starts in a fraction of the time.
Options: max_num_batched_tokens, max_num_seqs, block_size, eager (0 or 1).
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm import LLM, SamplingParams

from tests.bench.peers.protocol import Item, Settings, serve

MAX_MODEL_LEN = 2048


class VllmSide:
    def __init__(self, settings: Settings) -> None:
        self._prefix_caching = settings.prefix_caching
        # A checkpoint in int8 says so itself; its activations are of this type between products.
        dtype = "bfloat16" if settings.dtype == "int8" else settings.dtype
        sizes = {
            name: int(value)
            for name, value in settings.options.items()
            if name in ("max_num_batched_tokens", "max_num_seqs", "block_size")
        }
        self._llm = LLM(
            settings.model,
            dtype=dtype,
            enable_prefix_caching=settings.prefix_caching,
            enforce_eager=bool(settings.number("eager", int(settings.quick_start))),
            max_model_len=MAX_MODEL_LEN,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **sizes,
        )

    def reset(self) -> None:
        if self._prefix_caching and not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not forget its prefixes")

    def generate(self, items: Sequence[Item]) -> list[list[int]]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(item.prompt_token_ids)} for item in items],
            [_forced(item.num_output_tokens) for item in items],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


def _forced(num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        min_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
    )


if __name__ == "__main__":
    serve(VllmSide)
