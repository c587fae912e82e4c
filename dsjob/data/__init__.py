"""Data: which samples each rank sees, in which order, and how batches reach the device."""

from dsjob.data.batches import to_device as to_device
from dsjob.data.epochs import Epochs as Epochs
from dsjob.data.epochs import RepeatingLoader as RepeatingLoader
from dsjob.data.given import GivenLoader as GivenLoader
from dsjob.data.given import LoaderEvaluation as LoaderEvaluation
from dsjob.data.given import is_loader as is_loader
from dsjob.data.given import take_loader as take_loader
from dsjob.data.loader import EvaluationBatches as EvaluationBatches
from dsjob.data.loader import NoLoader as NoLoader
from dsjob.data.loader import TrainingLoader as TrainingLoader
from dsjob.data.stream import StreamLoader as StreamLoader
from dsjob.data.stream import load_training as load_training

Loader = TrainingLoader | StreamLoader | GivenLoader | NoLoader
