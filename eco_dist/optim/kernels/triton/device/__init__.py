"""The kernel itself: functions that Triton compiles.

They say in its language what `eco_dist.numerics` and `eco_dist.optim.rules` say in torch's, operation for operation.
"""
