"""From a YAML file and ``section.key=value`` overrides to a `TrainConfig`.

An unknown key or a value of the wrong kind is a ``ValueError`` of one sentence that names the key, where it stands (the
file or the override), and the nearest valid name.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import RootModel, ValidationError

from eco_dist.training.config import HEADLINE, SHORT, TrainConfig

__all__ = ["load_config", "to_plain"]

SECTIONS: dict[str, list[str]] = {
    name: [part.name for part in dataclasses.fields(section)]
    for name, section in get_type_hints(TrainConfig).items()
    if dataclasses.is_dataclass(section)
}
ALL_KEYS = [f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys]


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a configuration: defaults, then the YAML file, then the overrides from left to right.

    Args:
        path: a YAML file of sections; None starts from the defaults.
        overrides: ``section.key=value`` with a YAML value, or ``section=word`` for the sections in `HEADLINE`, or a key
            of `SHORT`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no YAML mapping, a key is unknown, or a value is out of range.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if path is not None:
        for key, value in _flatten(_read_yaml(path), f"file {path}"):
            values[key], sources[key] = value, f"file {path}"
    for override in overrides:
        for key, value in _parse_override(override):
            values[key], sources[key] = value, f"override {override!r}"
    return _validate(values, sources)


def to_plain(config: TrainConfig) -> dict[str, Any]:
    """The configuration as nested dicts of JSON and YAML values; `load_config` reads them back."""
    plain: dict[str, Any] = RootModel[TrainConfig](config).model_dump(mode="json")
    return plain


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"expected a YAML configuration file at {path}, found none; check the path")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"expected YAML in {path}, got a syntax error: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"expected sections in {path}, got a {type(content).__name__}; write 'run:' and keys below it")
    return content


def _flatten(content: dict[str, Any], source: str) -> list[tuple[str, Any]]:
    """Nested sections as (``section.key``, value) pairs; a section of one word stands for its headline key."""
    pairs: list[tuple[str, Any]] = []
    for section, body in content.items():
        section = str(section)
        if section not in SECTIONS:
            raise _unknown(section, source, list(SECTIONS))
        if isinstance(body, dict):
            pairs += [(_checked(f"{section}.{key}", source), value) for key, value in body.items()]
        elif section in HEADLINE:
            pairs.append((f"{section}.{HEADLINE[section]}", body))
        elif body is not None:
            raise ValueError(f"expected keys below section '{section}', got {body!r} ({source}); use '{section}.key'")
    return pairs


def _parse_override(override: str) -> list[tuple[str, Any]]:
    source = f"override {override!r}"
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"expected section.key=value, got {override!r}; for example run.steps=100")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"expected a YAML value for {key}, got {text!r} ({source}); quote it") from error
    key = SHORT.get(key, key)
    if "." in key:
        return [(_checked(key, source), value)]
    return _flatten({key: value}, source)


def _checked(key: str, source: str) -> str:
    section, _, name = key.partition(".")
    if section not in SECTIONS:
        raise _unknown(key, source, ALL_KEYS)
    if name not in SECTIONS[section]:
        raise _unknown(key, source, [f"{section}.{valid}" for valid in SECTIONS[section]])
    return key


def _unknown(key: str, source: str, valid: Sequence[str]) -> ValueError:
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.0)
    return ValueError(f"expected a known key, got '{key}' ({source}); did you mean '{near[0]}'?")


def _validate(values: dict[str, Any], sources: dict[str, str]) -> TrainConfig:
    nested: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    try:
        return TrainConfig(**nested)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:2])
        message = first["msg"].removeprefix("Value error, ")
        if not key:
            raise ValueError(message) from error
        raise ValueError(
            f"expected a valid value for {key}, got {first['input']!r} ({sources.get(key, 'default')}): "
            f"{message[0].lower()}{message[1:]}"
        ) from error
