"""Scripts for shells that complete what is typed after ``skipper``: tools, sub-commands, flags, and listed values.

Each script is a table, from the command that was typed so far to the words that may follow, and a few lines that use
it. If no words are listed, the shell completes files, because most other values are files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from skipper.cli.main import TOOLS
from skipper.commandline import Described, Option

Commands = Mapping[str, Described]
_OTHERS = {"help": "what a tool is for", "--help": "all tools", "--version": "which one this is"}


def bash(commands: Commands) -> str:
    """For bash 4 and newer; the package ``bash-completion`` is not needed."""
    arms = []
    for path, described in _paths(commands):
        arms.append(f'        "{path} -") words="{" ".join(_flags(described))}" ;;\n')
        if following := " ".join([*described.commands, *_listed(described)]):
            arms.append(f'        "{path} ") words="{following}" ;;\n')
        for flags, values in _valued(path, described):
            arms.append(f'        {flags}) words="{" ".join(values)}" ;;\n')
    tools = " ".join(_summaries(commands))
    return _BASH.format(tools=tools, longer=_longer(commands), arms="".join(arms))


def zsh(commands: Commands) -> str:
    """For zsh, after ``compinit``."""
    arms = []
    for path, described in _paths(commands):
        flags = [(name, option.help) for option in described.options for name in option.names]
        arms.append(f'    "{path} -") words_found=({_zsh_words(flags)}) ;;\n')
        following = [(name, each.description) for name, each in described.commands.items()]
        following += [(word, "") for word in _listed(described)]
        if following:
            arms.append(f'    "{path} ") words_found=({_zsh_words(following)}) ;;\n')
        for names, values in _valued(path, described):
            arms.append(f"    {names}) words_found=({_zsh_words([(word, '') for word in values])}) ;;\n")
    tools = _zsh_words(list(_summaries(commands).items()))
    return _ZSH.format(tools=tools, longer=_longer(commands), arms="".join(arms))


def fish(commands: Commands) -> str:
    """For fish 3 and newer."""
    longer = " ".join(f"'{path}'" for path, _ in _paths(commands) if " " in path)
    lines = [_FISH.format(longer=longer)]
    lines += [_fish_line("", f"-f -a {word}", said) for word, said in _summaries(commands).items()]
    for path, described in _paths(commands):
        lines += [_fish_line(path, f"-f -a {name}", each.description) for name, each in described.commands.items()]
        lines += [_fish_line(path, f"-f -a {word}", "") for word in _listed(described)]
        lines += [_fish_line(path, _fish_flag(option), option.help) for option in described.options if option.names]
    return "".join(lines)


SCRIPTS: Mapping[str, Callable[[Commands], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def _paths(commands: Commands) -> Iterator[tuple[str, Described]]:
    """Every command by the words that lead to it."""
    for word, described in commands.items():
        yield word, described
        for name, each in described.commands.items():
            yield f"{word} {name}", each


def _longer(commands: Commands) -> str:
    """The paths of two words, as alternatives of a pattern."""
    return "|".join(_quoted(path) for path, _ in _paths(commands) if " " in path)


def _summaries(commands: Commands) -> dict[str, str]:
    """The words that may come first."""
    return {**{word: TOOLS[word].summary for word in commands if " " not in word}, **_OTHERS}


def _flags(described: Described) -> list[str]:
    return [name for option in described.options for name in option.names]


def _listed(described: Described) -> list[str]:
    """The values of arguments without a flag."""
    return [word for option in described.options if not option.names for word in option.choices]


def _valued(path: str, described: Described) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Flags whose values are listed, as alternatives of a pattern."""
    for option in described.options:
        if option.names and option.choices:
            yield "|".join(_quoted(f"{path} {name}") for name in option.names), option.choices


def _quoted(word: str) -> str:
    return f'"{word}"'


def _zsh_words(words: list[tuple[str, str]]) -> str:
    return " ".join("'" + word.replace(":", r"\:") + ":" + _plain(said) + "'" for word, said in words)


def _fish_line(path: str, what: str, said: str) -> str:
    told = f" -d '{_plain(said)}'" if said else ""
    return f"complete -c skipper -n '__skipper_is_at \"{path}\"' {what}{told}\n"


def _fish_flag(option: Option) -> str:
    parts = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    if option.choices:
        parts.append(f"-x -a '{' '.join(option.choices)}'")
    elif option.value and not option.is_optional:
        parts.append("-r")
    return " ".join(parts)


def _plain(said: str) -> str:
    """Text in one line, safe within single quotes of a shell."""
    return " ".join(said.split()).replace("\\", "").replace("'", "'\\''")


_BASH = """\
# Completes `skipper` in bash. Made by `make cli`.
_skipper_words() {{
    case "$1" in
{arms}        *) words="" ;;
    esac
}}

_skipper() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} path="" words="" word
    [[ $current == "=" ]] && current=""
    [[ $before == "=" ]] && before=${{COMP_WORDS[COMP_CWORD-2]}}
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        if [[ -z $path ]]; then
            [[ $word == help ]] || path=$word
        else
            case "$path $word" in
                {longer}) path="$path $word" ;;
            esac
        fi
    done
    if [[ -z $path ]]; then
        words="{tools}"
    elif [[ $current == -* ]]; then
        _skipper_words "$path -"
    else
        [[ $before == -* ]] && _skipper_words "$path $before"
        [[ -n $words ]] || _skipper_words "$path "
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _skipper skipper
"""

_ZSH = """\
#compdef skipper
# Completes `skipper` in zsh. Made by `make cli`.
_skipper_words() {{
  case "$1" in
{arms}    *) words_found=() ;;
  esac
}}

_skipper() {{
  local current=$words[CURRENT] before=$words[CURRENT-1] at="" word
  local -a words_found
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    if [[ -z $at ]]; then
      [[ $word == help ]] || at=$word
    else
      case "$at $word" in
        {longer}) at="$at $word" ;;
      esac
    fi
  done
  if [[ -z $at ]]; then
    words_found=({tools})
  elif [[ $current == -* ]]; then
    _skipper_words "$at -"
  else
    [[ $before == -* ]] && _skipper_words "$at $before"
    (( $#words_found )) || _skipper_words "$at "
  fi
  if (( $#words_found )); then
    _describe -o skipper words_found
  else
    _files
  fi
}}

if [[ $funcstack[1] == _skipper ]]; then
  _skipper "$@"
else
  compdef _skipper skipper
fi
"""

_FISH = """\
# Completes `skipper` in fish. Made by `make cli`.
function __skipper_is_at
    set -l at ''
    for word in (commandline -opc)[2..-1]
        if test -z "$at"
            test "$word" = help; or set at $word
        else if contains -- "$at $word" {longer}
            set at "$at $word"
        end
    end
    test "$at" = "$argv[1]"
end
"""
