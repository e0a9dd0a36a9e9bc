"""The files in the folder of a sweep."""

CONFIGURATION, SESSIONS = 'sweep.yaml', 'sessions.jsonl'
RECORD, DAMAGED = 'record.jsonl', 'record.damaged'
EPISODES, CELLS, AGES = 'episodes.csv', 'cells.csv', 'ages.csv'
REPORT, FINDINGS = 'report.html', 'findings.md'
