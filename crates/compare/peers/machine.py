"""The machine: its name, its threads, and how much of it others use."""

import os
import time
from pathlib import Path


def processor():
    """The processor's name from /proc/cpuinfo, where there is one."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return os.uname().machine


class Load:
    """The share of the processor that others use from the start on, 0 to 1; None where the system does not say."""

    def __init__(self):
        self.start, self.own, self.all = time.time(), self._own(), self._all()

    def others(self):
        if self.all is None:
            return None
        others = (self._all() - self.all) - (self._own() - self.own)
        return min(1.0, max(0.0, others / ((os.cpu_count() or 1) * (time.time() - self.start))))

    @staticmethod
    def _own():
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    @staticmethod
    def _all():
        stat = Path("/proc/stat")
        if not stat.exists():
            return None
        fields = [int(field) for field in stat.read_text().splitlines()[0].split()[1:9]]
        return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
