"""Text as training data: files are tokenised once, and read from a memory-mapped cache."""

from dsjob.text.collate import Pad as Pad
from dsjob.text.dataset import Text as Text
from dsjob.text.metrics import Rouge as Rouge
from dsjob.text.metrics import exact_match as exact_match
from dsjob.text.mixture import Mixture as Mixture
from dsjob.text.prompts import Prompts as Prompts
