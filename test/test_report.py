"""The page of a run: complete, self-contained, and true to its trace."""

import csv
from xml.etree import ElementTree

import numpy as np
import pytest

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.lab import plots
from vla_edge_ros.lab.report import flatten, sentences, write_report
from vla_edge_ros.telemetry.trace import COLUMNS, read_trace

PERIOD_NS = 33_333_333
START_NS = 1_700_000_000_123_456_789
SUMMARY = {
    'ticks': 40, 'action_rate_hz': 30.0,
    'period_deviation_ms': {'p50': 0.1, 'p99': 0.5, 'max': 1.25},
    'decisions': {'full': 39, 'refuse': 1}, 'unexplained_ticks': 0,
    'camera': {'published': 80, 'received': 79, 'lost_fraction': 0.0125},
    'observation_age_ms': {'p50': 12.0, 'p95': 15.0, 'p99': 16.0, 'max': 17.0},
    'observation_age_by_cause': {
        'hold': {'count': 1, 'p50': 50.0, 'p95': 50.0, 'p99': 50.0, 'max': 50.0},
        'fresh': {'count': 38, 'p50': 12.0, 'p95': 15.0, 'p99': 16.0, 'max': 17.0},
        'waiting': {'count': 0, 'p50': None, 'p95': None, 'p99': None, 'max': None},
    },
    'observation_age_at_contact_ms': {
        'count': 3, 'p50': 12.5, 'p95': 13.0, 'p99': 13.0, 'max': 13.25},
    'episodes': 4, 'success_rate': 0.75,
}


@pytest.fixture
def trace(tmp_path):
    rows = []
    for tick in range(40):
        scheduled = START_NS + tick * PERIOD_NS
        full = tick != 20
        values = {
            'tick': tick, 'scheduled_ns': scheduled,
            'published_ns': scheduled + (2_000_000 if tick == 30 else 1_000_000),
            'decision': 'full' if full else 'refuse', 'reason': '' if full else 'over <budget>',
            'cause': 'fresh' if full else 'hold',
            'observation_age_ms': 12.5 if full else 50.0, 'estimate_ms': 9.0, 'budget_ms': 31.0,
            'preprocess_ms': 0.2, 'vision_ms': 0.5, 'prefill_ms': 3.0,
            'decode_ms': 5.0 if full else '', 'late': 0,
        }
        rows.append([values.get(name, '') for name, _, _ in COLUMNS])
    path = tmp_path / 'trace.csv'
    with open(path, 'w', newline='') as file:
        csv.writer(file).writerows([[name for name, _, _ in COLUMNS], *rows])
    return read_trace(path)


def test_jitter_shows_the_one_late_publication(trace):
    deviation = plots.period_deviation_ms(trace)
    assert np.argmax(deviation) == 29 and deviation[29] == pytest.approx(1.0)
    assert deviation[30] == pytest.approx(-1.0)
    assert np.count_nonzero(np.abs(deviation) > 0.01) == 2


def test_page_holds_four_pictures_and_loads_nothing(trace, tmp_path):
    page = tmp_path / 'report.html'
    write_report(page, SUMMARY, trace)
    text = page.read_text()
    assert text.count('<svg') == text.count('</svg>') == 4
    assert 'src="http' not in text and '<link' not in text and '<script' not in text
    for name in ('full', 'refuse', 'fresh', 'hold', 'estimate', 'prefill'):
        assert f'>{name}<' in text


@pytest.mark.parametrize(
    ('name', 'tag'), [('a.mp4', 'video'), ('a.gif', 'img'), ('a.webp', 'img')])
def test_page_links_the_film_beside_it(trace, tmp_path, name, tag):
    page = tmp_path / 'report.html'
    write_report(page, SUMMARY, trace, tmp_path / name)
    assert f'<{tag} src="{name}"' in page.read_text()


def test_pictures_are_well_formed_and_equal_for_equal_runs(trace):
    for draw in (plots.decisions, plots.observation_age, plots.jitter, plots.stage_times):
        text = draw(trace)
        ElementTree.fromstring(text)
        assert draw(trace) == text


def test_sentences_say_what_happened():
    said = ' '.join(sentences(SUMMARY))
    assert '40 ticks and published 30.00 actions' in said and 'worst to 1.25 ms' in said
    assert 'Of 80 camera frames 79 arrived (1.25 % lost)' in said
    assert 'these 39 actions' in said and 'than: fresh 16.0 ms (38), hold 50.0 ms (1).' in said
    assert 'met its object (3), half' in said and 'the oldest was 13.2 ms' in said
    assert '75 % of 4 episodes' in said
    assert 'Every tick published an action or says' in said
    assert '3 ticks have neither' in ' '.join(sentences({**SUMMARY, 'unexplained_ticks': 3}))


def test_sentences_leave_out_what_was_not_measured():
    nothing = dict.fromkeys(('p50', 'p95', 'p99', 'max'))
    summary = {
        **SUMMARY, 'action_rate_hz': None, 'observation_age_ms': nothing, 'episodes': None,
        'observation_age_by_cause': {}, 'observation_age_at_contact_ms': None,
        'camera': dict.fromkeys(('published', 'received', 'lost_fraction')),
    }
    assert sentences(summary) == ['Every tick published an action or says by name why not.']
    assert dict(flatten(summary))['episodes'] == 'not measured'


def test_every_number_of_the_summary_is_listed():
    names = dict(flatten(SUMMARY))
    assert names['camera.lost_fraction'] == '0.0125' and names['decisions.refuse'] == '1'


def test_trace_that_is_too_short_is_refused(trace, tmp_path):
    short = {name: column[:1] for name, column in trace.items()}
    with pytest.raises(ConfigError, match='at least two ticks'):
        write_report(tmp_path / 'report.html', SUMMARY, short)
