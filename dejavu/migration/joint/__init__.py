"""The plan of a running training, improved by what the training measures of it (eq. 4 to 6 of the paper).

posterior.py   factors on the prices, from every report of a rank
strategies.py  what each layer costs on the devices of each rank, at those prices
relaxed.py     the variables A over strategies, and their gradient steps between training steps
improving.py   both together: when the plan is looked at, and whether a change pays
"""

from dejavu.migration.joint.improving import Improvement

__all__ = ["Improvement"]
