"""exo's values as protobuf messages and back. Decoding checks; it never decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from exo.download.hub_cache import DIGEST, Listing, RepoFile
from exo.download.progress import Progress
from exo.download.sharing import Held
from exo.errors import ExoError, InvalidFrame, InvalidRequest, PlanMismatch, error_from_code
from exo.inference.sampling import SampledToken, SamplingParams
from exo.models.description import ModelDescription
from exo.networking.generated import node_service_pb2 as pb
from exo.shard import RingMember, RingPlan, Shard
from exo.topology.capabilities import DeviceCapabilities
from exo.topology.placement import NodePace

Wanted = TypeVar("Wanted")

PROTOCOL = 16
"""Raised whenever nodes of two versions could misunderstand each other, or compute the same answer
to other bits (tests/unit/inference/test_cpu_native_check.py)."""


@dataclass(frozen=True)
class ModelState:
    """What a node knows of a model that is or was served. `epoch` is that of its last plan, or of
    its unloading; `plan_hash` names the plan that serves, "" if none does; not `wanted`: it was
    unloaded, and no plan is to be made of it by itself."""

    model_id: str
    epoch: int
    plan_hash: str
    wanted: bool


@dataclass(frozen=True)
class PlansSaid:
    """What a node says of plans. `holds`: hashes of those it has a place in or is making; `plans`:
    those that serve and that the receiver did not name."""

    models: tuple[ModelState, ...] = ()
    holds: frozenset[str] = frozenset()
    plans: tuple[RingPlan, ...] = ()


@dataclass(frozen=True)
class StepFailure:
    """A step that raised on a member. `ring_broken`: no later step of the plan can succeed."""

    plan_hash: str
    step: int
    node_id: str
    error: ExoError
    ring_broken: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to generate: prompt, how to sample, when to end.

    `client` is whose it is, among whom turns are taken. `shortcuts`: what earlier sequences that
    begin alike have computed is used, and what can be guessed is computed ahead; neither changes a
    token.
    """

    sequence_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    eos_token_ids: frozenset[int] = field(default=frozenset())
    client: str = ""
    shortcuts: bool = True
    timeout_s: float = 0.0
    """From its coming to the head to its last token; 0: for ever."""
    generated: tuple[int, ...] = ()
    """Tokens that another ring has generated, and that count as this one's."""


class GenerationEvent(msgspec.Struct, frozen=True):
    """A token, or the end: `finish_reason` is "stop" or "length" on the last event. The first tells
    how many tokens of the prompt were `cached`, computed before. Before it some tell only how many
    of the prompt are computed by then."""

    token: SampledToken | None = None
    finish_reason: str = ""
    cached_tokens: int = 0
    prompt_done: int = 0


@dataclass(frozen=True)
class Prepared:
    """A node's answer to a planner: the model, the bytes a shard of it may take there, by model the
    bytes that others hold there, and how fast the node is."""

    description: ModelDescription
    memory_bytes: int
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    pace: NodePace = field(default_factory=NodePace)


@dataclass(frozen=True)
class HeldModel:
    """A model whose files are on a node: `size` bytes of disk; not `whole` if weight files are
    missing; `last_used` in seconds since 1970, 0 if that is not known."""

    model_id: str
    size: int
    whole: bool
    last_used: float = 0.0


@dataclass(frozen=True)
class DrainState:
    """`models` of which a node that is drained still has something, a part in their rings or layers
    in memory, and by model why it cannot be served without the node."""

    models: tuple[str, ...]
    problems: dict[str, str]


def capabilities_to_pb(found: DeviceCapabilities) -> pb.Capabilities:
    return pb.Capabilities(**found.to_json())


def capabilities_from_pb(message: pb.Capabilities) -> DeviceCapabilities:
    return DeviceCapabilities(
        model=message.model,
        chip=message.chip,
        accelerator=message.accelerator,
        memory_total_bytes=message.memory_total_bytes,
        memory_available_bytes=message.memory_available_bytes,
        cores=message.cores,
    )


def plan_to_pb(plan: RingPlan) -> pb.Plan:
    return pb.Plan(
        model_id=plan.model_id,
        epoch=plan.epoch,
        planner_id=plan.planner_id,
        checkpoint=plan.checkpoint,
        members=[
            pb.Plan.Member(
                node_id=member.node_id,
                shard=pb.Shard(
                    model_id=member.shard.model_id,
                    start_layer=member.shard.start_layer,
                    end_layer=member.shard.end_layer,
                    n_layers=member.shard.n_layers,
                    expert_share=member.shard.expert_share,
                ),
            )
            for member in plan.members
        ],
        left_out=[pb.Plan.LeftOut(node_id=n, reason=why) for n, why in plan.left_out],
        hash=plan.hash,
        predicted_step_s=plan.predicted_step_s,
        routed_share=plan.routed_share,
    )


def _shard_from_pb(message: pb.Shard) -> Shard:
    return Shard(
        message.model_id,
        message.start_layer,
        message.end_layer,
        message.n_layers,
        message.expert_share or 1.0,
    )


def plan_from_pb(message: pb.Plan) -> RingPlan:
    """Raises PlanMismatch where the plan contradicts itself or its own hash."""
    plan = RingPlan(
        model_id=message.model_id,
        epoch=message.epoch,
        planner_id=message.planner_id,
        checkpoint=message.checkpoint,
        members=tuple(RingMember(m.node_id, _shard_from_pb(m.shard)) for m in message.members),
        left_out=tuple((left.node_id, left.reason) for left in message.left_out),
        predicted_step_s=message.predicted_step_s,
        routed_share=message.routed_share,
    )
    if message.hash != plan.hash:
        raise PlanMismatch(
            f"a plan of {plan.model_id} says its hash is {message.hash!r}, "
            f"its content gives {plan.hash}"
        )
    return plan


def progress_to_pb(progress: Progress) -> pb.Progress:
    return pb.Progress(
        node_id=progress.node_id,
        phase=progress.phase,
        detail=progress.detail,
        done=progress.done,
        total=progress.total,
        file=progress.file,
        file_done=progress.file_done,
        file_total=progress.file_total,
        warning=progress.warning,
        by_source=dict(progress.by_source),
        model_id=progress.model_id,
        speed=progress.speed,
        average_speed=progress.average_speed,
    )


def progress_from_pb(message: pb.Progress) -> Progress:
    return Progress(
        message.phase,
        message.detail,
        message.done,
        message.total,
        message.node_id,
        message.file,
        message.file_done,
        message.file_total,
        message.warning,
        tuple(sorted(message.by_source.items())),
        message.model_id,
        message.speed,
        message.average_speed,
    )


def held_to_pb(held: Sequence[Held]) -> pb.HeldFilesReply:
    return pb.HeldFilesReply(
        files=[
            pb.HeldFilesReply.File(digest=one.digest, whole=one.is_whole, blocks=one.blocks)
            for one in held
        ]
    )


def listing_to_pb(listing: Listing | None) -> pb.ListRepoReply:
    if listing is None:
        return pb.ListRepoReply()
    files = [
        pb.ListRepoReply.File(
            path=file.path,
            size=file.size,
            git_sha1=file.git_sha1,
            sha256=file.sha256 or "",
            xet_hash=file.xet_hash or "",
        )
        for file in listing.files
    ]
    return pb.ListRepoReply(commit=listing.commit, files=files)


def listing_from_pb(repo: str, message: pb.ListRepoReply) -> Listing | None:
    """Raises InvalidFrame where a digest is none: it becomes the name of a file."""
    if not message.commit:
        return None
    files = tuple(
        RepoFile(f.path, f.size, f.git_sha1, f.sha256 or None, f.xet_hash or None)
        for f in message.files
    )
    for digest in [message.commit, *(file.digest for file in files)]:
        if not DIGEST.fullmatch(digest):
            raise InvalidFrame(f"a listing of {repo} has the digest {digest!r}")
    return Listing(repo, message.commit, files)


def description_to_pb(found: ModelDescription) -> pb.ModelDescription:
    return pb.ModelDescription(
        model_type=found.model_type,
        checkpoint=found.checkpoint,
        layer_bytes=found.layer_bytes,
        first_bytes=found.first_bytes,
        last_bytes=found.last_bytes,
        cuts=sorted(found.cuts or ()),
        uncuttable=found.uncuttable,
        context_length=found.context_length,
        kv_bytes=found.kv_bytes,
        shared_bytes=found.shared_bytes,
        expert_bytes=found.expert_bytes,
        unread_bytes=found.unread_bytes,
        routed_share=found.routed_share,
    )


def description_from_pb(model_id: str, message: pb.ModelDescription) -> ModelDescription:
    return ModelDescription(
        model_id=model_id,
        model_type=message.model_type,
        checkpoint=message.checkpoint,
        layer_bytes=tuple(message.layer_bytes),
        first_bytes=message.first_bytes,
        last_bytes=message.last_bytes,
        context_length=message.context_length,
        cuts=frozenset(message.cuts) if message.uncuttable else None,
        uncuttable=message.uncuttable,
        kv_bytes=message.kv_bytes,
        shared_bytes=message.shared_bytes,
        expert_bytes=tuple(message.expert_bytes),
        unread_bytes=tuple(message.unread_bytes),
        routed_share=message.routed_share or 1.0,
    )


def failure_to_pb(failure: StepFailure) -> pb.StepFailure:
    return pb.StepFailure(
        plan_hash=failure.plan_hash,
        step=failure.step,
        node_id=failure.node_id,
        error=pb.Error(
            code=failure.error.code, message=failure.error.message, param=failure.error.param or ""
        ),
        ring_broken=failure.ring_broken,
    )


def failure_from_pb(message: pb.StepFailure) -> StepFailure:
    error = error_from_code(message.error.code, message.error.message, message.error.param or None)
    return StepFailure(message.plan_hash, message.step, message.node_id, error, message.ring_broken)


def generation_to_pb(plan_hash: str, request: GenerationRequest) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        plan_hash=plan_hash,
        sequence_id=request.sequence_id,
        prompt=request.prompt,
        sampling=msgspec.msgpack.encode(request.sampling),
        max_tokens=request.max_tokens,
        eos_token_ids=sorted(request.eos_token_ids),
        client=request.client,
        no_shortcuts=not request.shortcuts,
        timeout_s=request.timeout_s,
        generated=request.generated,
    )


def generation_from_pb(message: pb.GenerateRequest) -> GenerationRequest:
    """Raises InvalidFrame where how to sample cannot be read."""
    return GenerationRequest(
        message.sequence_id,
        tuple(message.prompt),
        decoded(message.sampling, SamplingParams),
        message.max_tokens,
        frozenset(message.eos_token_ids),
        message.client,
        not message.no_shortcuts,
        message.timeout_s,
        tuple(message.generated),
    )


def event_to_pb(event: GenerationEvent) -> pb.GenerateEvent:
    return pb.GenerateEvent(
        token=msgspec.msgpack.encode(event.token) if event.token else b"",
        finish_reason=event.finish_reason,
        cached_tokens=event.cached_tokens,
        prompt_done=event.prompt_done,
    )


def event_from_pb(message: pb.GenerateEvent) -> GenerationEvent:
    """Raises InvalidFrame where the token cannot be read."""
    token = decoded(message.token, SampledToken) if message.token else None
    return GenerationEvent(token, message.finish_reason, message.cached_tokens, message.prompt_done)


def decoded(data: bytes, kind: type[Wanted]) -> Wanted:
    """A value in MessagePack. Raises InvalidFrame where it cannot be read."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequest) as error:
        raise InvalidFrame(f"a {kind.__name__} that cannot be read: {error}") from error
