"""Words of a command line that are passed on as flags of launch/dlrm.py. Imports nothing, so that commands start
quickly."""

from collections.abc import Sequence


def split_forwarded(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns a command's own words, and the flags of launch/dlrm.py: from --preset on, or after --."""
    for i, word in enumerate(words):
        if word == "--" or word.partition("=")[0] == "--preset":
            return [*words[:i]], [*words[i + (word == "--") :]]
    return [*words], []


def take_flag(words: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """Returns the value of a flag (the last one, if it is repeated) and all other words.

    It is given as `--flag value` or `--flag=value`, with - or _ in its name; its value is None if it is absent.
    """
    value, others, rest = None, [], iter(words)
    for word in rest:
        name, equals, given = word.partition("=")
        if name.startswith("--") and name.replace("_", "-") == flag:
            value = given if equals else next(rest, None)
        else:
            others.append(word)
    return value, others


def preset_name(flags: Sequence[str]) -> str:
    """Returns the preset that flags of launch/dlrm.py name, or the default preset."""
    return take_flag(flags, "--preset")[0] or "smoke"
