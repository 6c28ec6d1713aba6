"""Files become batches of token ids.

In the order of a row's path:

- `sources.py` reads a table (with `json_files.py`, `hub.py`, `reasoning_gym.py`), and `selection.py` filters it.
- `prompts.py`, `preferences.py`, `labeled_responses.py` and `demonstrations.py` find their kind of rows in a table.
- `conversations.py` checks texts and messages, `chat_template.py` renders them, `tokenization.py` makes token ids,
  `length_limits.py` leaves out long rows.
- `loader.py` yields batches, in an order of `order.py`.
"""

from hybridflow.data.demonstrations import load_demonstrations
from hybridflow.data.labeled_responses import load_labeled
from hybridflow.data.loader import BatchStream
from hybridflow.data.preferences import load_preferences
from hybridflow.data.prompts import load_prompts

__all__ = ["BatchStream", "load_demonstrations", "load_labeled", "load_preferences", "load_prompts"]
