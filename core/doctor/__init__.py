"""What this machine grants bmoe, measured: one file per question, one function per check, each bounded in time.

A check takes :class:`~bmoe.doctor.findings.Sources` and gives a :class:`~bmoe.doctor.findings.Finding`. What could hang
or crash is tried in a child process (:mod:`bmoe.doctor.apart`); :mod:`bmoe.doctor.report` runs them all.
"""
