"""The fault suite: a save is killed, refused or cut off at every call it makes, and the next start must lose nothing.

    calls.py      the system calls that count, and a trace of a save as such calls
    children.py   a case in a forked child, under strace: what it did, how it ended
    subjects.py   what is put to the test: the shipped writer alone, and a whole `_save_checkpoint` of the rig
    checks.py     what must hold afterwards, as lists of problems in words
    disks.py      small file systems of our own, whose power can be cut
    broken.py     writers with a known fault, which the checks must catch
    figures.py    what was tried, added up over all tests

A check never raises for what it finds: it returns problems, so that the same check proves the shipped writer and
convicts the broken ones.
"""
