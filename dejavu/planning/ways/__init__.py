"""Other ways through the ranks than the listed schedules of whole sequences: what of them is worth simulating.

both_ways.py   two copies of the model in opposite directions (Chimera)
slices.py      sequences in slices (TeraPipe)
equal_ranks.py one configuration on all ranks, where several stages run on each
nodes.py       over nodes that fill up, where links between them are slow
"""
