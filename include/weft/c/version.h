/* The version of weft. CMake, `weft --version`, packages and the wheel read it from this header. */
#ifndef WEFT_C_VERSION_H
#define WEFT_C_VERSION_H

#define WEFT_VERSION_MAJOR 0
#define WEFT_VERSION_MINOR 2
#define WEFT_VERSION_PATCH 0

/* as text, "1.2.3" */
#define WEFT_VERSION WEFT_VERSION_TEXT(WEFT_VERSION_MAJOR, WEFT_VERSION_MINOR, WEFT_VERSION_PATCH)
#define WEFT_VERSION_TEXT(major, minor, patch) WEFT_VERSION_JOIN(major, minor, patch)
#define WEFT_VERSION_JOIN(major, minor, patch) #major "." #minor "." #patch
/* A later version has a larger number. */
#define WEFT_VERSION_NUMBER (WEFT_VERSION_MAJOR * 1000000 + WEFT_VERSION_MINOR * 1000 + WEFT_VERSION_PATCH)

#endif
