# The steps that run_tests.sh of the CUDA kernels and of the Metal kernels share. A script that reads this file exports
# the folder `programs`, the beginning `kind` of the names of programs and the function compile_tests (macros, program),
# and defines options_of, which prints all macros for each line of standard input.

# Compiles and runs one specialisation. The argument is its name, then `|`, then all macros.
test_one() {
    local name="${1%%|*}" macros="${1#*|}" program
    program="$programs/${kind}_$(md5sum <<<"$macros" | cut -c1-16)"
    if ! compile_tests "$macros" "$program"; then
        echo "$name: does not compile"
        return 1
    fi
    local output status=0
    output="$("$program" 2>&1)" || status=1
    echo "$name: $(tail -1 <<<"$output")"
    grep -E 'FAIL |FAULT' <<<"$output"
    return $status
}
export -f test_one

# Adds to each line on standard input all macros that follow from it.
complete() {
    local names
    names="$(grep -v '^$')"
    paste -d'|' <(echo "$names") <(options_of <<<"$names")
}

# Runs the specialisations of a list, and ends the script.
run_list() {
    grep -v '^$' <<<"$1" | xargs -d '\n' -P "${JOBS:-$(nproc)}" -I{} bash -c 'test_one "$1"' _ {}
    local status=$?
    ((status == 0)) && echo "all specialisations passed" || echo "a specialisation FAILED"
    exit $status
}
