"""The parts of `dejavu/full`, each as a deployment of its own: `dejavu/profile`, `dejavu/plan` and so on."""

from flows.initialize import initialize as _initialize
from flows.plan import plan as _plan
from flows.profiling import profile as _profile
from flows.train import train as _train

OF = "dejavu"
profile, plan, initialize, train = (part.with_options(name=OF) for part in (_profile, _plan, _initialize, _train))
