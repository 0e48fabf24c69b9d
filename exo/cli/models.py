"""`exo models`, `exo du`, `exo rm`: what is on this machine and what can be."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from exo.cli.client import get_json
from exo.cli.settings import existing_part, home
from exo.download.hub_cache import cache_folder
from exo.download.progress import unheard
from exo.download.store import ModelStore, default_sources
from exo.errors import ModelNotFound, PeerUnavailable
from exo.models.card import ModelCard, registry, resolve
from exo.orchestration.files.usage import Usage
from exo.topology.fit import Free, best, fit


def show_models(args: argparse.Namespace) -> int:
    """Models that are here or on nodes of the cluster this machine is in; with --all, also every
    short name."""
    store = _store()
    elsewhere = _on_nodes(args.chatgpt_api_port)
    known = store.available()
    cards = {card.model_id: card for card in known}
    cards |= {name: ModelCard(name, name) for name in elsewhere if name not in cards}
    if args.all:
        cards = registry() | cards
    last_used = Usage(home() / "usage.json").last_used()
    columns = ["model", "name", "size", *(_MORE if args.all else []), "last used"]
    table = _table(*columns, *(["nodes"] if elsewhere else []), "files")
    free = _free(args.chatgpt_api_port) if args.all else Free(0, 0, 0)
    for card in cards.values():
        here = store.find(card.model_id, {}) if card in known else None
        nodes = elsewhere.get(card.model_id, [])
        if not (here or card.path or nodes or card.wheel or args.all):
            continue
        where = str(here or card.path or ("on other nodes" if nodes else ""))
        used = max([n["last_used"] or 0 for n in nodes] + [last_used.get(card.model_id, 0)])
        part = ", in part" if here and store.find(card.model_id) is None else ""
        if card.path is not None and card.path.is_file():
            taken = card.path.stat().st_size
        else:
            taken = store.size(here) if here else 0
        about = "" if taken else "about "
        known_size = taken or card.size_bytes
        size = f"{about}{known_size / 1e6:,.0f} MB{part}" if known_size else ""
        row = [card.model_id, card.name, size]
        row += _more(known_size, free, card, store) if args.all else []
        row += [_ago(used)]
        row += [", ".join(map(_share, nodes))] if elsewhere else []
        table.add_row(*row, where)
    console = _console()
    console.print(table)
    if not args.all:
        console.print(
            "\nAny other model is fetched at first use, or by `exo download`; `exo models --all` "
            "lists every short name. A directory, a .gguf file and org/repo:Q4_K_M work too.",
            style="dim",
        )
    else:
        console.print(
            "\nWhat is not here is fetched at first use. `exo models MODEL` says more of one, and "
            "which GGUF of it fits best. Models that see are run as text.",
            style="dim",
        )
    return 0


_MORE = ("fits", "for", "context")
"""What --all tells besides."""


def _more(size: int, free: Free, card: ModelCard, store: ModelStore) -> list[str]:
    context = f"{card.context // 1024}k" if card.context else ""
    return [_fits(size, free, card, store), " ".join(card.kinds), context]


def _show_card(card: ModelCard, store: ModelStore, api_port: int) -> None:
    """What is known of a model whose files are not here."""
    free = _free(api_port)
    rows = {
        "name": card.name,
        "for": ", ".join(kind for kind in card.kinds if kind != "vision")
        + ("; it sees, and is run as text" if "vision" in card.kinds else ""),
        "context": f"{card.context:,} tokens",
        "licence": card.licence,
        "weights": f"about {card.size_bytes / 1e6:,.0f} MB",
        "fits": _fits(card.size_bytes, free, card, store),
        "repo": str(card.repo),
    }
    if card.gguf:
        sizes = card.quantizations()
        chosen = best(sizes, free)
        rows["as GGUF"] = card.gguf + (f":{chosen}" if chosen else "")
        if chosen:
            rows["as GGUF"] += f" fits best, about {sizes[chosen] / 1e6:,.0f} MB"
        elif sizes:
            rows["as GGUF"] += ", too large in any quantization"
    for name, value in rows.items():
        print(f"{name:14} {value}")  # noqa: T201
    print(f"\nNot here yet; bring it: exo download {card.model_id}")  # noqa: T201


def show_model(args: argparse.Namespace) -> int:
    """What the files of a model here say of it, or where they are not what is known of it. Raises
    ModelNotFound where that is nothing."""
    from exo.api.sampling_defaults import sampling_defaults
    from exo.models.description import context_length, read_config, text_config
    from exo.models.tensor_table import is_gguf, weight_files
    from exo.models.tokenizer import load_tokenizer

    card, store = resolve(args.model), _store()
    path = store.find(card.model_id, {})
    if path is None and store.lies_here(card.model_id):
        path = asyncio.run(store.ensure(card.model_id, unheard))
    if path is None and card.model_id in registry():
        _show_card(card, store, args.chatgpt_api_port)
        return 0
    if path is None:
        raise ModelNotFound(
            f"{args.model} is not on this machine; bring it: exo download {args.model}"
        )
    config = read_config(path)
    text = text_config(config)
    tokenizer = load_tokenizer(str(config.get("model_type")), path)
    markup = tokenizer.markup
    said = sampling_defaults(path)
    listed = ", ".join(f"{name} {value:g}" for name, value in said.items())
    calls = markup.calls.name if markup.calls else "channels"
    files = weight_files(path)
    bits = (config.get("quantization") or {}).get("bits")
    packed = f", mostly {_format(files)}" if is_gguf(path) else f", {bits} bits" if bits else ""
    rows = {
        "name": card.name,
        "architecture": str(config.get("model_type")),
        "layers": str(text.get("num_hidden_layers", "")),
        "context": f"{context_length(config):,} tokens",
        "vocabulary": f"{tokenizer.vocabulary_size:,} tokens",
        "weights": f"{sum(file.stat().st_size for file in files) / 1e6:,.0f} MB{packed}",
        "sampling": listed or "not said by its makers: greedy, or --default-temp",
        "thinks": "yes" if markup.thinks else "no",
        "tools": f"as {calls}" if markup.knows_tools else f"by convention, as {calls}",
    }
    if not tokenizer.is_for_chat:
        del rows["thinks"], rows["tools"]
        rows["chat"] = "no template: for completions alone"
    rows["files"] = str(path)
    for name, value in rows.items():
        print(f"{name:14} {value}")  # noqa: T201
    return 0


def _format(files: list[Path]) -> str:
    """The format that most bytes of some weight files are in."""
    from exo.models.tensor_table import tensors_of

    taken: Counter[str] = Counter()
    for file in files:
        for entry in tensors_of(file).values():
            taken[entry.dtype] += entry.nbytes
    return taken.most_common(1)[0][0]


def _free(api_port: int) -> Free:
    """Memory that models may take, here alone if no node runs."""
    from exo.topology.capabilities import probe

    try:
        said = asyncio.run(get_json(api_port, "/v1/catalog"))["memory"]
    except PeerUnavailable:
        found = probe()
        here = found.memory_available_bytes
        return Free(here, here, here if found.accelerator == "cpu" else 0)
    return Free(said["here"], said["cluster"], said.get("mixtures", 0))  # of an older exo, too


def _fits(size: int, free: Free, card: ModelCard, store: ModelStore) -> str:
    fits, missing = fit(size, free)
    if fits == "no":
        fits, missing = fit(size, free, store.with_experts(card).expert_bytes)
    words = {
        "here": "here",
        "cluster": "the cluster",
        "part": "in part: slower",
        "no": f"no, {missing / 1e9:.0f} GB short",
    }
    return words[fits] if fits else ""


def _on_nodes(api_port: int) -> dict[str, list[dict[str, Any]]]:
    """What the nodes of the cluster hold, by model; nothing if no node runs here."""
    try:
        found = asyncio.run(get_json(api_port, "/v1/cluster/models"))
    except PeerUnavailable:
        return {}
    return {model["id"]: model["nodes"] for model in found["data"]}


def _share(node: dict[str, Any]) -> str:
    return str(node["node_id"]) + ("" if node["whole"] else f" ({node['size'] / 1e6:,.0f} MB)")


def _ago(moment: float) -> str:
    if not moment:
        return ""
    minutes = max(0, int(time.time() - moment)) // 60
    for length, name in ((1440, "day"), (60, "hour"), (1, "minute")):
        if minutes >= length:
            count = minutes // length
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


def show_usage(args: argparse.Namespace) -> int:
    """Disk taken by each model that is here, the largest first, and what is free."""
    store = _store()
    names = [card.model_id for card in store.available()]
    found = [(name, here) for name in names if (here := store.find(name, {}))]
    sizes = sorted(((store.size(here), name) for name, here in found), reverse=True)
    table = _table("model", "size")
    for size, name in sizes:
        table.add_row(name, f"{size / 1e6:,.0f} MB")
    console = _console()
    console.print(table)
    free = shutil.disk_usage(existing_part(cache_folder())).free
    total = sum(size for size, _ in sizes)
    console.print(f"\n{total / 1e9:.2f} GB of models, {free / 1e9:.1f} GB free", style="dim")
    return 0


def remove(args: argparse.Namespace) -> int:
    """Delete a model's files from this machine."""
    freed = _store().remove(args.model)
    print(f"{args.model} is gone, {freed / 1e6:,.0f} MB are free again")  # noqa: T201
    return 0


def _store() -> ModelStore:
    models_dir = home() / "models"
    return ModelStore(models_dir, default_sources(models_dir))


def _console() -> Console:
    """Lines for programs are not cut."""
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else 1000)


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 3, 0, 0))
    for column in columns:
        justify: Literal["left", "right"] = "right" if column == "size" else "left"
        table.add_column(column, justify=justify, overflow="fold")
    return table
