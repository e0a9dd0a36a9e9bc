"""The files in the folder of a sweep."""

CONFIGURATION, RECORD, SESSIONS = 'sweep.yaml', 'record.jsonl', 'sessions.jsonl'
EPISODES, CELLS, AGES = 'episodes.csv', 'cells.csv', 'ages.csv'
REPORT, FINDINGS = 'report.html', 'findings.md'
