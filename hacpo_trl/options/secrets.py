"""A run's settings as plain data without what must be in no file: tokens and keys."""

import json
import re
from typing import Any


# Names of settings, at any depth, whose values are secret.
SECRET = re.compile(r"(^|_)(token|tokens|key|api_key|password|secret)$", re.IGNORECASE)
# These have such names and hold none.
NOT_SECRET = {"pad_token", "eos_token", "bos_token", "unk_token"}


def without_secrets(value: Any) -> Any:
    """Plain data with every secret replaced by None."""
    if isinstance(value, dict):
        return {
            key: None if SECRET.search(str(key)) and key not in NOT_SECRET else without_secrets(item)
            for key, item in value.items()
        }
    return [without_secrets(item) for item in value] if isinstance(value, (list, tuple)) else value


def settings_without_secrets(args: Any) -> dict[str, Any]:
    """The settings of a `HACPOConfig`, such that JSON gives back the same."""
    return json.loads(json.dumps(without_secrets(args.to_dict()), default=str))
