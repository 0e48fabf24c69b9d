"""`exo models`: what can be used, and where its files are."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from exo.cli.settings import home
from exo.download.store import ModelStore, default_sources
from exo.models.card import registry


def show_models(args: argparse.Namespace) -> int:
    """Models that are here or can be fetched; with --all, every short name."""
    models_dir = home() / "models"
    store = ModelStore(models_dir, default_sources(models_dir))
    cards = {card.model_id: card for card in store.available()}
    if args.all:
        cards = registry() | cards
    table = Table(box=None, header_style="dim", padding=(0, 3, 0, 0))
    for column in ("model", "name", "files"):
        table.add_column(column)
    for card in cards.values():
        here = store.find(card.model_id)
        where = str(here) if here else "fetched at first use" if card.wheel else "not here"
        table.add_row(card.model_id, card.name, where)
    console = Console(soft_wrap=True)
    console.print(table)
    if not args.all:
        console.print(
            "\nA local directory or a .gguf file works too; `exo models --all` lists every short "
            "name.",
            style="dim",
        )
    return 0
