"""Secrets of the command line: what clients have to bring, and what nodes share."""

from __future__ import annotations

import argparse
import logging
import os

from exo.errors import InvalidRequest

logger = logging.getLogger(__name__)

API_KEY = "EXO_API_KEY"
"""The environment variable with the key of a node that wants one."""

CLUSTER_KEY = "EXO_CLUSTER_KEY"
"""The same for what nodes prove to each other."""

SHORTEST_CLUSTER_KEY = 16
"""Letters; fewer can be guessed by who has seen two nodes greet each other."""


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Of the flags, the file and EXO_API_KEY.

    Raises:
        InvalidRequest: the file cannot be read, or a key is none.
    """
    keys = [*args.api_key, os.environ.get(API_KEY, "")]
    if args.api_key_file is not None:
        try:
            lines = args.api_key_file.expanduser().read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"--api-key-file {args.api_key_file}: {error}") from error
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise InvalidRequest(f"--api-key-file {args.api_key_file} holds no key")
        keys += found
    if any(not key.isascii() or " " in key for key in keys):
        raise InvalidRequest("an API key is of ASCII letters without spaces")
    return tuple(dict.fromkeys(filter(None, keys)))


def cluster_key(args: argparse.Namespace) -> str:
    """Of the file, else of EXO_CLUSTER_KEY; empty where there is neither.

    Raises:
        InvalidRequest: the file cannot be read, or what it holds is none.
    """
    key, source = os.environ.get(CLUSTER_KEY, ""), CLUSTER_KEY
    if args.cluster_key_file is not None:
        file = args.cluster_key_file.expanduser()
        source = f"--cluster-key-file {file}"
        try:
            key = file.read_text("utf-8-sig")  # an editor of Windows marks its files
            readable = file.stat().st_mode & 0o077
        except FileNotFoundError as error:
            raise InvalidRequest(
                f"{source}: there is no such file; `openssl rand -hex 32 > {file}` makes one, "
                "which all nodes of the cluster need"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{source}: {error}") from error
        if readable:
            logger.warning(
                "%s can be read by other users of this machine: chmod 600 %s", source, file
            )
    elif not key:
        return ""
    key = key.strip()
    if len(key) < SHORTEST_CLUSTER_KEY or "\n" in key:
        raise InvalidRequest(
            f"{source}: a cluster key is one line of at least {SHORTEST_CLUSTER_KEY} letters; "
            "`openssl rand -hex 32` makes one"
        )
    return key
