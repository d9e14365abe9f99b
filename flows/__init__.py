"""What a person touches: CLI, job spec, progress, Prefect flows."""

import storage as _storage  # before Arrow is loaded

__all__ = ["_storage"]
