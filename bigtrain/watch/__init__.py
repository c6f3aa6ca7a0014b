"""A thread beside training on every rank that notices when nothing moves, says why, and ends the run on all ranks.

    whereabouts (a module of its own)     what this rank is doing, as noted by the parts that do it
    mesh                                  lines between the watches of all ranks
    stacks                                what a process can say of itself: stacks, last module, last collectives
    verdict                               pure: from what is known of all ranks to who is behind, and why
    watcher                               the thread: hear, judge, report to OUT/hang/, end
    current                               the one watch of a process, which the rest of bigtrain begins, asks and ends

It needs nothing from the training thread and nothing from the process groups, since those are what may be stuck.
"""

from bigtrain.watch.current import begin, end, failed, fails_alike, limited, lost, names_modules, seen
from bigtrain.watch.verdict import KILLED
from bigtrain.watch.watcher import LEARNED, Limit

__all__ = ["KILLED", "LEARNED", "Limit", "begin", "end", "failed", "fails_alike", "limited", "lost", "names_modules", "seen"]
