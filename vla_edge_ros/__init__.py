"""Run vision-language-action policies on a robot under a hard deadline and a fixed memory budget."""
