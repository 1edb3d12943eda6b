"""The table of jobs, in which all bulk work of operators is kept: start at job.py. The work is done elsewhere.

relay/operate/release.py has the jobs with parked rows, relay/replay/run.py the replays.
"""
