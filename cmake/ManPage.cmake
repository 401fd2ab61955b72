# Writes weft.1 from the tool's own help: cmake -DWEFT=<tool> -DOUTPUT=<file> -P ManPage.cmake
function(help_of variable)
  execute_process(COMMAND ${WEFT} ${ARGN} --help OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(${variable} "${text}" PARENT_SCOPE)
endfunction()

# verbatim(<variable> <text>): keeps lines as they are.
function(verbatim variable text)
  string(REPLACE "\\" "\\e" text "${text}")
  string(REPLACE "-" "\\-" text "${text}")
  string(REGEX REPLACE "(^|\n)([.'])" "\\1\\\\\\\\&\\2" text "${text}")
  set(${variable} ".nf\n${text}\n.fi\n" PARENT_SCOPE)
endfunction()

execute_process(COMMAND ${WEFT} --version OUTPUT_VARIABLE version COMMAND_ERROR_IS_FATAL ANY OUTPUT_STRIP_TRAILING_WHITESPACE)
help_of(help)
string(REGEX REPLACE ".*\nSubcommands:[^\n]*\n" "" commands "${help}")
string(REGEX MATCHALL "(^|\n)  [a-z]+" commands "${commands}")
list(TRANSFORM commands STRIP)
if(NOT commands)
  message(FATAL_ERROR "weft --help names no command:\n${help}")
endif()
set(sections)
foreach(command ${commands})
  help_of(text ${command})
  verbatim(text "${text}")
  string(APPEND sections ".SS weft ${command}\n${text}")
endforeach()
set(page ".\\\" Made from `weft --help` by cmake/ManPage.cmake.
.TH WEFT 1 \"\" \"${version}\" \"User Commands\"
.SH NAME
weft \\- run programs of many ranks, look for their faults, measure, train
.SH SYNOPSIS
.B weft
.I command
[options]
.SH DESCRIPTION
weft starts the ranks of a program on this host and supervises them. Other commands train a transformer over a
mesh of ranks, compare meshes, show what the machine has, test transports with random programs, look into
checkpoints and measure collectives.
.SH COMMANDS
${sections}.SH EXIT STATUS
0: success. 2: wrong options or values. 1: any other error. weft run: the status of the first rank that failed.
.SH SEE ALSO
/usr/share/doc/weft/docs of the package weft\\-dev
")
file(WRITE ${OUTPUT} "${page}")
