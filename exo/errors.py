"""Every error exo raises on purpose, with the status a client sees for it.

    ExoError                     internal_error            500  INTERNAL
    ├── InvalidRequest           invalid_request           400  INVALID_ARGUMENT
    │   ├── PromptTooLong        context_length_exceeded   400  INVALID_ARGUMENT
    │   └── InvalidFrame         invalid_frame             400  INVALID_ARGUMENT
    ├── Unauthorized             invalid_api_key           401  UNAUTHENTICATED
    ├── ModelNotFound            model_not_found           404  NOT_FOUND
    ├── ModelUnsupported         model_unsupported         400  FAILED_PRECONDITION
    ├── ModelTooLarge            model_too_large           503  RESOURCE_EXHAUSTED
    ├── DownloadFailed           download_failed           502  UNAVAILABLE
    │   ├── SourceUnreachable    source_unreachable        502  UNAVAILABLE
    │   ├── AccessDenied         access_denied             403  PERMISSION_DENIED
    │   ├── DiskFull             disk_full                 507  RESOURCE_EXHAUSTED
    │   └── DownloadCancelled    download_cancelled        409  ABORTED
    ├── PeerUnavailable          peer_unavailable          503  UNAVAILABLE
    │   └── NodeLeft             node_left                 503  UNAVAILABLE
    ├── PlanMismatch             plan_mismatch             503  ABORTED
    ├── CacheMiss                cache_miss                503  ABORTED
    ├── EngineFailed             engine_failed             500  INTERNAL
    ├── Overloaded               overloaded                429  RESOURCE_EXHAUSTED
    ├── StepTimeout              step_timeout              504  DEADLINE_EXCEEDED
    └── Stalled                  stalled                   504  DEADLINE_EXCEEDED

An error crosses the wire as (code, message, param) and is raised again as the same class.
"""

from __future__ import annotations


class ExoError(Exception):
    """Base of all of exo's own errors; the message says what was wrong and what to do."""

    code = "internal_error"
    http_status = 500
    grpc_status = "INTERNAL"
    retry_after_s: int | None = None
    """When to try again, where that may help by itself."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(ExoError):
    """The client asked for something malformed or out of range; `param` names the field."""

    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class PromptTooLong(InvalidRequest):
    """The prompt (plus the tokens asked for) does not fit the model's context."""

    code = "context_length_exceeded"


class InvalidFrame(InvalidRequest):
    """A message from a peer lies about its shape, dtype, size or place in the ring."""

    code = "invalid_frame"


class Unauthorized(ExoError):
    """The node wants one of its API keys, and the request brings none."""

    code = "invalid_api_key"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class ModelNotFound(ExoError):
    """No such model, or its files are nowhere this node can get them."""

    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class ModelUnsupported(ExoError):
    """The checkpoint is here but no engine can run it, or not over several nodes."""

    code = "model_unsupported"
    http_status = 400
    grpc_status = "FAILED_PRECONDITION"


class ModelTooLarge(ExoError):
    """The cluster's free memory cannot hold the model."""

    code = "model_too_large"
    http_status = 503
    grpc_status = "RESOURCE_EXHAUSTED"


class DownloadFailed(ExoError):
    """A file could not be fetched or did not have the expected checksum."""

    code = "download_failed"
    http_status = 502
    grpc_status = "UNAVAILABLE"


class SourceUnreachable(DownloadFailed):
    """A source of models cannot be asked at all; another one may have the model."""

    code = "source_unreachable"


class AccessDenied(DownloadFailed):
    """The hub gives the model's files only to who may have them: a gated or private repo."""

    code = "access_denied"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class DiskFull(DownloadFailed):
    """The model's files do not fit this machine's disk."""

    code = "disk_full"
    http_status = 507
    grpc_status = "RESOURCE_EXHAUSTED"


class DownloadCancelled(DownloadFailed):
    """Somebody stopped the download; what came is kept."""

    code = "download_cancelled"
    http_status = 409
    grpc_status = "ABORTED"


class PeerUnavailable(ExoError):
    """A node that a request needs died, hangs or cannot be reached."""

    code = "peer_unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class NodeLeft(PeerUnavailable):
    """A node said goodbye."""

    code = "node_left"


class PlanMismatch(ExoError):
    """A message belongs to another ring plan than the one its receiver holds."""

    code = "plan_mismatch"
    http_status = 503
    grpc_status = "ABORTED"


class CacheMiss(ExoError):
    """A slice starts after what the KV cache holds; the head answers by prefilling again."""

    code = "cache_miss"
    http_status = 503
    grpc_status = "ABORTED"


class EngineFailed(ExoError):
    """The inference engine raised while loading or running a shard."""

    code = "engine_failed"
    http_status = 500
    grpc_status = "INTERNAL"


class Overloaded(ExoError):
    """More requests are waiting than this node will queue."""

    code = "overloaded"
    http_status = 429
    retry_after_s = 5
    grpc_status = "RESOURCE_EXHAUSTED"


class StepTimeout(ExoError):
    """A node did not answer within the deadline of the call."""

    code = "step_timeout"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class Stalled(ExoError):
    """Long work, like a download or a load, did not move until its deadline."""

    code = "stalled"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


def _subclasses(cls: type[ExoError]) -> list[type[ExoError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _subclasses(sub))]


def error_from_code(code: str, message: str, param: str | None = None) -> ExoError:
    """The error a peer raised, as the same class here; an unknown code is a plain ExoError."""
    by_code = {cls.code: cls for cls in _subclasses(ExoError)}
    return by_code.get(code, ExoError)(message, param=param)
