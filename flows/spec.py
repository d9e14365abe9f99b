"""The job spec, as the other modules import it: model, files and identity."""

from __future__ import annotations

from flows.errors import SpecError
from flows.fingerprint import Fingerprint, fingerprint
from flows.spec_model import EncodeSpec, EngineSpec, JobSpec, PromptSpec, SamplingSpec
from flows.specfile import build, load, read_schema

__all__ = [
    "EncodeSpec",
    "EngineSpec",
    "Fingerprint",
    "JobSpec",
    "PromptSpec",
    "SamplingSpec",
    "SpecError",
    "build",
    "fingerprint",
    "load",
    "read_schema",
]
