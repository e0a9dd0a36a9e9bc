"""The generated parts of the documents, between two marks."""

from collections.abc import Iterable


def renew(text: str, name: str, lines: Iterable[str]) -> str:
    """
    Return a page with other lines in its generated part.

    Parameters
    ----------
    text : str
        The page.
    name : str
        Of the part: it stands between ``<!-- NAME: generated -->`` and ``<!-- NAME: end -->``.
    lines : iterable of str
        What is to stand there.

    Raises
    ------
    ValueError
        The page has no such part, or has it more than once.

    """
    begin, end = f'<!-- {name}: generated -->', f'<!-- {name}: end -->'
    if not text.count(begin) == text.count(end) == 1 or text.index(end) < text.index(begin):
        raise ValueError(f'a page must have {begin} and then {end}, each once')
    before, after = text.split(begin)[0], text.split(end)[1]
    return '\n'.join([f'{before}{begin}', '', *lines, '', f'{end}{after}'])
