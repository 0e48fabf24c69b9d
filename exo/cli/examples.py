"""Examples for `--help` of each command. A test runs every one of them."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "run": (
        ("exo run", "a conversation; /help in it lists commands"),
        ('exo run qwen3-0.6b --prompt "Why is the sky blue?"', ""),
        ('git diff | exo run --prompt "Review this"', "what is piped in goes with the question"),
        ('exo run --file notes.md --prompt "Sum up" --json', "for programs"),
    ),
    "download": (
        ("exo download qwen3-0.6b", "a short name; `exo models --all` lists them"),
        ("exo download Qwen/Qwen3-1.7B-MLX-4bit@main -v", "a repo at a revision"),
        ("exo download qwen3-0.6b --all-nodes", "to every node, each byte from the hub once"),
    ),
    "rm": (
        ("exo rm qwen3-0.6b", "asked for again, it is fetched again"),
        ("exo rm Qwen/Qwen3-1.7B-MLX-4bit", "one that was named by its repo"),
    ),
    "du": (
        ("exo du", "a line for each model"),
        ("exo du | tail -n 1", "all of them"),
    ),
    "models": (
        ("exo models", "those whose files are here, and on which nodes"),
        ("exo models --all", "also those that could be fetched"),
        ("exo models smollm2-135m", "what is known of one: size, context, sampling"),
    ),
    "status": (
        ("exo status", "who is in the cluster, what is loaded where"),
        ("exo status --json", "for programs"),
    ),
    "top": (
        ("exo top", "the cluster, again each second"),
        ("exo top --chatgpt-api-port 52415", "as the node at this port sees it"),
    ),
    "drain": (
        ("exo drain", "this machine's node"),
        ("exo drain studio", "another one, before it is updated"),
        ("exo drain studio --undo", "use it again"),
    ),
    "doctor": (
        ("exo doctor", "what is wrong, and the command that mends it"),
        ("exo doctor --verify", "are all model files whole?"),
        ("exo doctor --bundle report.tar.gz", "for a bug report; holds no secrets"),
    ),
    "update": (
        ("exo update", "what is newer, and how to get it"),
        ("exo update --json", "for programs"),
    ),
    "service": (
        ("exo service install", "start a node with this machine"),
        ("exo service install -- --memory 12GB", "with flags of the node"),
        ("exo service status", ""),
    ),
    "completion": (
        ('eval "$(exo completion bash)"', "in ~/.bashrc; zsh alike"),
        ("exo completion fish > exo.fish", "into ~/.config/fish/completions"),
    ),
    "bench": (
        ("exo bench --prefill 128 --decode 16 --batch 1,4", "the default model on this machine"),
        ("exo bench --running --prefill 128 --decode 0 --json", "through the node that runs here"),
    ),
}


def shown(command: str) -> str:
    """For the end of the command's help."""
    width = max(len(line) for line, _ in EXAMPLES[command])
    lines = [f"  {line:{width}}  {why}".rstrip() for line, why in EXAMPLES[command]]
    return "\n".join(["examples:", *lines])
