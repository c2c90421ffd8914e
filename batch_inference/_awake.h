/* See _awake.c. */

#include <stdint.h>

#define KEEP_AWAKE_LONG INT64_C(5000000)    /* ns: awake.LONG */

int64_t monotonic_ns(void);     /* CLOCK_MONOTONIC */
void keep_awake(int64_t ns);
int prepare_to_keep_awake(void);
