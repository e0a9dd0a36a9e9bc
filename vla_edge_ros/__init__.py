"""Run vision-language-action policies under a hard deadline and a fixed memory budget."""
