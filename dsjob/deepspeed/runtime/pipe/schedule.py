"""`deepspeed.runtime.pipe.schedule`."""

from dsjob.deepspeed.absent import explain_names as _explain_names
from dsjob.pipelines.instructions import BackwardPass as BackwardPass
from dsjob.pipelines.instructions import BufferOpInstruction as BufferOpInstruction
from dsjob.pipelines.instructions import ForwardPass as ForwardPass
from dsjob.pipelines.instructions import LoadMicroBatch as LoadMicroBatch
from dsjob.pipelines.instructions import OptimizerStep as OptimizerStep
from dsjob.pipelines.instructions import PipeInstruction as PipeInstruction
from dsjob.pipelines.instructions import RecvActivation as RecvActivation
from dsjob.pipelines.instructions import RecvGrad as RecvGrad
from dsjob.pipelines.instructions import ReduceGrads as ReduceGrads
from dsjob.pipelines.instructions import ReduceTiedGrads as ReduceTiedGrads
from dsjob.pipelines.instructions import SendActivation as SendActivation
from dsjob.pipelines.instructions import SendGrad as SendGrad
from dsjob.pipelines.schedules import DataParallelSchedule as DataParallelSchedule
from dsjob.pipelines.schedules import InferenceSchedule as InferenceSchedule
from dsjob.pipelines.schedules import PipeSchedule as PipeSchedule
from dsjob.pipelines.schedules import TrainSchedule as TrainSchedule

__getattr__ = _explain_names(__name__)
