/* The exchange inside a node: kernels of several blocks, their hosts, and the word `lost`, set when
 * a rank of the node gets no more results.
 *
 * A kernel is BLOCKS blocks.  A block decides whether it goes on, does its part, and reports.  The
 * last block to report decides for the whole step and signals the other ranks or the host.  Names
 * are those of csrc/device.  Numbers of exchanges begin at 1.  README.md describes the scope of the
 * model and how to run the searches.
 *
 * A d_step is a single step of a block or host.  Any other step may happen between two steps.  The
 * names in #ifdef are variants, each broken in a single respect. */

#define RANKS 2
#define BLOCKS 2
#define RING 1 /* entries; the second exchange reuses the memory of the first */
#ifndef EXCHANGES
#define EXCHANGES 2 /* even, since AHEAD posts two at a time */
#endif
#ifndef FAULTS
#define FAULTS 1
#endif

/* The kernels of an exchange.  The step `local_all_gather` has 2 kernels, every other step 1. */
#define PUBLISH_INPUT 0
#define LOCAL_REDUCE_SCATTER 1
#define PUBLISH_RESULT 2
#define LOCAL_ALL_GATHER_FIRST 3
#define LOCAL_ALL_GATHER 4
#define KERNELS 5 /* of an exchange */
#define ALL_KERNELS (KERNELS * EXCHANGES)

/* --- state ------------------------------------------------------------------------------------ */

/* Words of each rank, signalled to all ranks of the node.  Each holds the last exchange in which:
 * the rank's input is ready, the rank has read all inputs, its result is ready, the rank has read
 * all results. */
byte input_ready[RANKS], inputs_read[RANKS], result_ready[RANKS], results_read[RANKS];
byte posted[RANKS], arrived[RANKS]; /* posted to the host, arrived from the host */
bit aborted[RANKS];                 /* the rank's host has published the end */
bit lost[RANKS];                    /* inbox word: a rank of the node gets no more results */

byte reports[RANKS]; /* blocks of the running kernel that have ended */
bit gave_up[RANKS];  /* a block of the running step has given up */
byte ended[RANKS];   /* number of ended kernels */

/* The last exchange that wrote each block's part of an entry. */
byte input[RANKS * RING * BLOCKS], staged[RANKS * RING * BLOCKS], result[RANKS * RING * BLOCKS];
byte target[RANKS * 2 * BLOCKS]; /* caller's memory, by rank, kernel of the gather, block */
#define CELL(rank, number, block) ((rank) * RING + (number) % RING) * BLOCKS + (block)
#define TARGET(rank, kernel, block) \
  target[((rank) * 2 + (kernel) - LOCAL_ALL_GATHER_FIRST) * BLOCKS + (block)]

byte kernels[ALL_KERNELS], numbers[ALL_KERNELS]; /* kernel and exchange, by place in a stream */
byte faults;                                     /* faults left */
bit half_read, half_written, stuck;              /* asserted to stay 0 */

/* --- what a block waits for ------------------------------------------------------------------- */

#define ALL_AT(words, number) (words[0] >= (number) && words[1] >= (number))
/* The previous exchange in the same entry of the ring must be over. */
#ifdef ENTRY_NOT_AWAITED
#define ALL_LEFT(words, number) true
#else
#define ALL_LEFT(words, number) ((number) <= RING || ALL_AT(words, (number) - RING))
#endif
#define READY(rank, kernel, number) \
  ((kernel == PUBLISH_INPUT && ALL_LEFT(inputs_read, number)) || \
   (kernel == LOCAL_REDUCE_SCATTER && ALL_AT(input_ready, number) && \
    ((number) <= RING || arrived[rank] >= (number) - RING)) || \
   (kernel == PUBLISH_RESULT && arrived[rank] >= (number) && ALL_LEFT(results_read, number)) || \
   (kernel >= LOCAL_ALL_GATHER_FIRST && ALL_AT(result_ready, number) && !lost[rank]))
#ifdef ABORT_NOT_SEEN
#define OVER(rank) (lost[rank])
#else
#define OVER(rank) (lost[rank] || aborted[rank])
#endif

/* --- kernels ---------------------------------------------------------------------------------- */

#define ALL_ARE(array, rank, number) \
  (array[CELL(rank, number, 0)] == (number) && array[CELL(rank, number, 1)] == (number))
#define TARGET_IS(rank, number) \
  (TARGET(rank, LOCAL_ALL_GATHER_FIRST, 0) == (number) && \
   TARGET(rank, LOCAL_ALL_GATHER_FIRST, 1) == (number) && \
   TARGET(rank, LOCAL_ALL_GATHER, 0) == (number) && \
   TARGET(rank, LOCAL_ALL_GATHER, 1) == (number))

inline do_part(rank, block, kernel, number) {
  if
  :: kernel == PUBLISH_INPUT -> input[CELL(rank, number, block)] = number
  :: kernel == LOCAL_REDUCE_SCATTER ->
       printf("rank %d block %d sums up exchange %d\n", rank, block, number);
       half_read = !(ALL_ARE(input, 0, number) && ALL_ARE(input, 1, number));
       assert(!half_read);
       staged[CELL(rank, number, block)] = number
  :: kernel == PUBLISH_RESULT -> result[CELL(rank, number, block)] = number
  :: kernel >= LOCAL_ALL_GATHER_FIRST ->
       printf("rank %d block %d collects exchange %d\n", rank, block, number);
       half_read = !(ALL_ARE(result, 0, number) && ALL_ARE(result, 1, number));
       assert(!half_read);
       TARGET(rank, kernel, block) = number
  fi
}

inline signal_lost(rank) {
  printf("rank %d signals that it is lost\n", rank);
  lost[rank] = 1;
#ifndef LOSS_NOT_SIGNALLED
  lost[1 - rank] = 1
#endif
}

inline signal_good(rank, kernel, number) {
  printf("rank %d ends kernel %d of exchange %d\n", rank, kernel, number);
  if
  :: kernel == PUBLISH_INPUT -> input_ready[rank] = number
  :: kernel == LOCAL_REDUCE_SCATTER ->
       inputs_read[rank] = number;
       posted[rank] = number
  :: kernel == PUBLISH_RESULT -> result_ready[rank] = number
  :: kernel == LOCAL_ALL_GATHER ->
       half_written = !TARGET_IS(rank, number);
       assert(!half_written);
       results_read[rank] = number
  fi
}

#define UNDECIDED 0
#define LOOKED 1 /* a kernel that posts has seen no end at its start */
#define GO 2
#define GIVE_UP 3

/* A block's part and report are a single step: the part is not read before the step is signalled as
 * good. */
inline report(rank, block, kernel, number) {
  if
  :: decision == GO -> do_part(rank, block, kernel, number)
  :: decision == GIVE_UP
  fi;
  reports[rank]++;
#ifdef BLOCK_DECIDES_ALONE
  gave_up[rank] = 0;
#endif
  gave_up[rank] = gave_up[rank] || decision == GIVE_UP;
  if
  :: reports[rank] < BLOCKS
  :: reports[rank] == BLOCKS ->
       reports[rank] = 0;
       ended[rank]++;
       if
       :: kernel == LOCAL_ALL_GATHER_FIRST
#ifdef VERDICT_OF_EACH_KERNEL
          -> gave_up[rank] = 0
#endif
       :: kernel != LOCAL_ALL_GATHER_FIRST ->
            if
            :: gave_up[rank] -> signal_lost(rank)
            :: !gave_up[rank] -> signal_good(rank, kernel, number)
            fi;
            gave_up[rank] = 0
       fi
  fi
}

/* A block of a rank's stream, which runs kernels one after another.  Any other step may happen
 * between a block's look and its report: the block may go on although the end has come since. */
#define RUNS(rank, at) (at < ALL_KERNELS && ended[rank] == at && decision < GO)
proctype Block(byte rank, block) {
  byte at;       /* number of kernels run by this block */
  byte decision; /* decision in the running kernel */
  do
  :: d_step { RUNS(rank, at) && decision == UNDECIDED &&
              kernels[at] <= LOCAL_REDUCE_SCATTER && !OVER(rank) ->
       decision = LOOKED
     }
  :: d_step { RUNS(rank, at) && (decision == LOOKED || kernels[at] > LOCAL_REDUCE_SCATTER) &&
              READY(rank, kernels[at], numbers[at]) ->
       decision = GO
     }
  :: d_step { RUNS(rank, at) && OVER(rank) ->
       printf("rank %d block %d gives up\n", rank, block);
       decision = GIVE_UP
     }
  :: d_step { decision >= GO ->
       report(rank, block, kernels[at], numbers[at]);
       decision = UNDECIDED;
       at++
     }
  :: at == ALL_KERNELS -> break
  od
}

/* --- hosts ------------------------------------------------------------------------------------ */

/* A host carries out posted exchanges, with the same local rank of other nodes.  It may end at any
 * time. */
proctype Host(byte rank) {
  bit carries;
end:
  do
  :: d_step { !carries && posted[rank] > arrived[rank] && !aborted[rank] ->
       printf("host %d begins to carry exchange %d\n", rank, arrived[rank] + 1);
       half_read = !ALL_ARE(staged, rank, arrived[rank] + 1);
       assert(!half_read);
       carries = 1
     }
  :: d_step { carries ->
       half_read = !ALL_ARE(staged, rank, arrived[rank] + 1);
       assert(!half_read);
       carries = 0;
       arrived[rank]++
     }
  :: d_step { faults > 0 && !aborted[rank] ->
       printf("host %d ends\n", rank);
       faults--;
       aborted[rank] = 1;
       carries = 0
     }
  :: aborted[rank] -> break
  od
}

#define FINISHED \
  (ended[0] == ALL_KERNELS && ended[1] == ALL_KERNELS && \
   (aborted[0] || aborted[1] || (results_read[0] == EXCHANGES && results_read[1] == EXCHANGES)))

proctype Watch() {
  timeout; /* no other step is possible */
  stuck = !(FINISHED);
  assert(!stuck)
}

inline add(kernel, number) {
  kernels[i] = kernel;
  numbers[i] = number;
  i++
}
inline add_posts(number) { add(PUBLISH_INPUT, number); add(LOCAL_REDUCE_SCATTER, number) }
inline add_deliveries(number) {
  add(PUBLISH_RESULT, number);
  add(LOCAL_ALL_GATHER_FIRST, number);
  add(LOCAL_ALL_GATHER, number)
}

init {
  byte i, n = 1;
  atomic {
    do
    :: n > EXCHANGES -> break
    :: n <= EXCHANGES ->
         add_posts(n);
#ifdef AHEAD
         n++;
         add_posts(n);
         add_deliveries(n - 1);
#endif
         add_deliveries(n);
         n++
    od;
    select(faults : 0 .. FAULTS);
    run Block(0, 0); run Block(0, 1); run Block(1, 0); run Block(1, 1);
    run Host(0); run Host(1);
    run Watch()
  }
}
