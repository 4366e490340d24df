"""The cluster to plan for.

A `Cluster` comes from a cluster.yaml (`load_cluster`), from this machine (`this_machine`) or from the record of an
earlier run (`Cluster.from_dict`). Once loaded, edits of the file do not matter, and `fingerprint` says whether two runs
planned for the same hardware. Every default that was used is a sentence in `assumptions`.

The files, each importing only from those above it:

    records.py       DeviceType, Link, HostMemory, Nvme, NodeGroup, Device, Cluster
    catalogue.py     the devices of dejavu/devices.csv, and the latencies where none is given
    form.py          what a cluster.yaml may say, and its JSON Schema
    this_machine.py  what torch and the operating system report of the hardware here
    loader.py        from the file's form to the records

Limits: `MAX_DEVICES` devices in all, `MAX_LISTED_HOSTS` listed host names (equal hosts are better written as a count),
`MAX_GROUPS` groups of nodes.

`python -m dejavu.cluster --schema` prints the JSON Schema that editors use (dejavu/cluster.schema.json).

`catalogue` and `this_machine` are the functions here; what else their files hold is imported from the full path.
"""

from dejavu.cluster.catalogue import catalogue
from dejavu.cluster.form import MAX_DEVICES, MAX_GROUPS, MAX_LISTED_HOSTS, json_schema
from dejavu.cluster.loader import load_cluster
from dejavu.cluster.records import DTYPES, Cluster, Device, DeviceType, HostMemory, Kind, Link, NodeGroup, Nvme, pair
from dejavu.cluster.this_machine import this_machine

__all__ = [
    "DTYPES",
    "MAX_DEVICES",
    "MAX_GROUPS",
    "MAX_LISTED_HOSTS",
    "Cluster",
    "Device",
    "DeviceType",
    "HostMemory",
    "Kind",
    "Link",
    "NodeGroup",
    "Nvme",
    "catalogue",
    "json_schema",
    "load_cluster",
    "pair",
    "this_machine",
]
