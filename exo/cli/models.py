"""`exo models`, `exo du`, `exo rm`: what is on this machine and what can be."""

from __future__ import annotations

import argparse
import shutil

from rich.console import Console
from rich.table import Table

from exo.cli.settings import home
from exo.download.hub_cache import cache_folder
from exo.download.store import ModelStore, default_sources
from exo.models.card import registry


def show_models(args: argparse.Namespace) -> int:
    """Models that are here; with --all, also every short name."""
    store = _store()
    cards = {card.model_id: card for card in store.available()}
    if args.all:
        cards = registry() | cards
    table = _table("model", "name", "size", "files")
    for card in cards.values():
        here = store.find(card.model_id)
        if here is None and card.wheel is None and not args.all:
            continue
        where = str(here) if here else "fetched at first use"
        size = f"{store.size(here) / 1e6:,.0f} MB" if here else ""
        table.add_row(card.model_id, card.name, size, where)
    console = Console(soft_wrap=True)
    console.print(table)
    if not args.all:
        console.print(
            "\nAny other model is fetched at first use, or by `exo download`; `exo models --all` "
            "lists every short name. A local directory or a .gguf file works too.",
            style="dim",
        )
    return 0


def show_usage(args: argparse.Namespace) -> int:
    """Disk taken by each model that is here, the largest first, and what is free."""
    store = _store()
    found = [(c.model_id, here) for c in store.available() if (here := store.find(c.model_id))]
    sizes = sorted(((store.size(here), name) for name, here in found), reverse=True)
    table = _table("model", "size")
    for size, name in sizes:
        table.add_row(name, f"{size / 1e6:,.0f} MB")
    console = Console(soft_wrap=True)
    console.print(table)
    folder = cache_folder()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
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


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column == "size" else "left")
    return table
