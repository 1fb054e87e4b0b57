"""User-written YAML files: plain data, unique keys, ValueError for everything that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; YAMLError for a duplicate key. Merged keys (``<<``) may repeat."""
        seen: set[Any] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                name = (key.tag, key.value)
                if name in seen:
                    raise yaml.MarkedYAMLError(None, None, f"duplicate key {key.value}", key.start_mark)
                seen.add(name)
        return super().construct_mapping(node, deep)


def read(path: Path) -> Any:
    """The content of a YAML file; ValueError if the file cannot be read, is not valid YAML, or is more than data; the
    message has the path."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506  (a SafeLoader)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except Exception:  # PyYAML's constructors stumble over ``!!bool x`` in several ways
        why = "it is nested too deeply, or a value does not fit its tag, the word behind !!"
        raise ValueError(f"{path} is not valid YAML: {why}") from None
