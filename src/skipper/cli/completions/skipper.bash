# Completes `skipper` in bash. Made by `make cli`.
_skipper_words() {
    case "$1" in
        "bw -") words="-h --help -v --verbose --local --bind --host -p --port -d --net-devices --ib-dev --pairs --secret-file --timeout -s --size -a --all --minbytes -e --maxbytes -f --stepfactor --op -b --bidirectional --backend --mem --use_cuda --batch --copy-threads -n --iters -w --warmup --warmup_iters -D --duration --quick --latency --check --min-bw -J --json --csv --plot" ;;
        "bw --op") words="read write fetch-add compare-and-swap" ;;
        "bw --backend") words="auto shm cuda_ipc ucx verbs" ;;
        "bw compare -") words="-h --help -v --verbose --relative --tolerance --fail-below -J --json" ;;
        "actors -") words="-h --help -v --verbose --quick -J --json --csv -n --procs -s --size --bulk" ;;
        "dispatch -") words="-h --help -v --verbose --quick -J --json --csv --layers --width --samples --hosts --per-host --secret-file --certs --insecure" ;;
        "scale -") words="-h --help -v --verbose --quick -J --json --csv -n --procs --fanout -s --size --ranks --hollow --real --net --page" ;;
        "scale --net") words="tcp local" ;;
        "weight-sync -") words="-h --help -v --verbose --quick -J --json --csv --device --model --layers --backend --mode --trainers --generators --tp -n --iterations --modelled --page" ;;
        "weight-sync --device") words="cpu cuda" ;;
        "weight-sync --backend") words="auto shm cuda_ipc ucx verbs" ;;
        "weight-sync --mode") words="direct snapshot" ;;
        "run -") words="-h --help -v --verbose -n --name -m --module --logs --folder --interval --stacks" ;;
        "run --logs") words="labelled raw off" ;;
        "record -") words="-h --help -v --verbose -J --json" ;;
        "record ") words="show replay" ;;
        "record show -") words="-h --help -v --verbose -n --events -a --all -J --json" ;;
        "record replay -") words="-h --help -v --verbose --speed --last" ;;
        "host -") words="-h --help -v --verbose" ;;
        "host ") words="secret serve drain status" ;;
        "host secret -") words="-h --help -v --verbose --per-host --of --host" ;;
        "host serve -") words="-h --help -v --verbose --insecure --announce --idle-timeout --until-eof --fd --secret-stdin --address --host --port --secret-file --certs" ;;
        "host drain -") words="-h --help -v --verbose --timeout --address --host --port --secret-file --certs" ;;
        "host status -") words="-h --help -v --verbose --timeout -J --json --address --host --port --secret-file --certs" ;;
        "certs -") words="-h --help -v --verbose" ;;
        "certs ") words="init issue delegate renew revoke rotate update" ;;
        "certs init -") words="-h --help -v --verbose --days --cluster" ;;
        "certs issue -") words="-h --help -v --verbose --host --name --role --days" ;;
        "certs issue --role") words="script host client" ;;
        "certs delegate -") words="-h --help -v --verbose --role" ;;
        "certs delegate --role") words="script host client" ;;
        "certs renew -") words="-h --help -v --verbose --days" ;;
        "certs revoke -") words="-h --help -v --verbose --update" ;;
        "certs rotate -") words="-h --help -v --verbose --finish --days --update" ;;
        "certs update -") words="-h --help -v --verbose" ;;
        "names -") words="-h --help -v --verbose" ;;
        "names ") words="serve list" ;;
        "names serve -") words="-h --help -v --verbose --address --certificate --key --insecure --host --port --secret-file --certs --authority" ;;
        "names list -") words="-h --help -v --verbose --address --timeout -J --json --host --port --secret-file --certs --authority" ;;
        "status -") words="-h --help -v --verbose -j --job --timeout -J --json -w --watch -n --times" ;;
        "stacks -") words="-h --help -v --verbose -j --job --timeout --native -a --all -J --json" ;;
        "logs -") words="-h --help -v --verbose -j --job -f --follow --since -t --times -J --json" ;;
        "debug -") words="-h --help -v --verbose -j --job --timeout -c --command" ;;
        "dashboard -") words="-h --help -v --verbose -j --job --timeout --port --host --interval --slow-after --hung-after --record --token" ;;
        "weights -") words="-h --help -v --verbose" ;;
        "weights ") words="verify certificate" ;;
        "weights verify -") words="-h --help -v --verbose --store -j --job --timeout" ;;
        "weights certificate -") words="-h --help -v --verbose --version --store -j --job --timeout" ;;
        "metrics -") words="-h --help -v --verbose -j --job --timeout --serve --host --port -J --json --grafana --token --secret-file" ;;
        "doctor -") words="-h --help -v --verbose -J --json --ucx-library --trial --exposure --pid --asked" ;;
        "completion -") words="-h --help -v --verbose" ;;
        "completion ") words="bash zsh fish" ;;
        *) words="" ;;
    esac
}

_skipper() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} path="" words="" word
    [[ $current == "=" ]] && current=""
    [[ $before == "=" ]] && before=${COMP_WORDS[COMP_CWORD-2]}
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        if [[ -z $path ]]; then
            [[ $word == help ]] || path=$word
        else
            case "$path $word" in
                "bw compare"|"record show"|"record replay"|"host secret"|"host serve"|"host drain"|"host status"|"certs init"|"certs issue"|"certs delegate"|"certs renew"|"certs revoke"|"certs rotate"|"certs update"|"names serve"|"names list"|"weights verify"|"weights certificate") path="$path $word" ;;
            esac
        fi
    done
    if [[ -z $path ]]; then
        words="bw actors dispatch scale weight-sync run record host certs names status stacks logs debug dashboard weights metrics doctor completion help --help --version"
    elif [[ $current == -* ]]; then
        _skipper_words "$path -"
    else
        [[ $before == -* ]] && _skipper_words "$path $before"
        [[ -n $words ]] || _skipper_words "$path "
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _skipper skipper
