/* N-gram drafts for speculative decoding: predicts a sequence's next tokens from earlier occurrences of its last tokens,
 * in the sequence itself and in its family (the other samples of the same prompt). Compiled and loaded by `bindings.py`;
 * `engines/native/ngram_history.py` maintains the sequences.
 *
 * Shapes: H sequences of up to W tokens, B rows (sequences being decoded), at most K drafted tokens per row.
 */

#include <stdint.h>

#define CHOICES 32 /* candidate next tokens, of which the most frequent is drafted; further candidates are ignored */
#define STRETCH 16 /* tokens compared at once, so that the compiler vectorizes the search */

typedef struct {
    int64_t length; /* length of the matched suffix, tokens */
    int count;      /* candidates */
    int32_t token[CHOICES];
    int64_t votes[CHOICES];
    const int32_t *place[CHOICES]; /* most recent occurrence: in the sequence itself, else in the family */
    const int32_t *limit[CHOICES]; /* end of the sequence of that occurrence */
} Matches;

/* Searches tokens[low, high) for suffixes of `own` of up to `most` tokens and counts the token after each of the longest
 * matches. */
static void find_suffix(const int32_t *tokens, int64_t low, int64_t high, int64_t length, const int32_t *own,
                        int64_t own_length, int64_t most, Matches *found) {
    int32_t last = own[own_length - 1];
    for (int64_t end = high; end > low; end -= STRETCH) {
        int64_t begin = end - STRETCH > low ? end - STRETCH : low;
        int any = 0;
        for (int64_t i = begin; i < end; i++) any |= tokens[i] == last;
        if (!any) continue;
        for (int64_t i = end - 1; i >= begin; i--) {
            if (tokens[i] != last) continue;
            int64_t same = 1, first = i < own_length - 1 ? i : own_length - 1;
            while (same < most && same <= first && tokens[i - same] == own[own_length - 1 - same]) same++;
            if (same < found->length) continue;
            if (same > found->length) {
                found->length = same;
                found->count = 0;
            }
            int32_t next = tokens[i + 1];
            int which = 0;
            while (which < found->count && found->token[which] != next) which++;
            if (which == CHOICES) continue;
            if (which == found->count) {
                found->count++;
                found->token[which] = next;
                found->votes[which] = 0;
                found->place[which] = tokens + i + 1;
                found->limit[which] = tokens + length;
            }
            found->votes[which]++;
        }
    }
}

/* Drafts up to limits[row] next tokens per row. Outputs: drafts[B, K], the number of drafted tokens counts[B], and the
 * length of the matched suffix matched[B] (0: no match). The row's sequence is slots[row] of tokens[H, W]. Its family is
 * the circular list through `next`; the first begins[H] tokens of a family member (the shared prompt) are not searched. */
void draft(const int32_t *tokens, int64_t width, const int64_t *lengths, const int64_t *begins, const int64_t *next,
           const int64_t *slots, const int64_t *limits, int64_t rows, int64_t least, int64_t most, int64_t drafted,
           int64_t *drafts, int64_t *counts, int64_t *matched) {
#pragma omp parallel for schedule(dynamic) if (rows > 8)
    for (int64_t row = 0; row < rows; row++) {
        int64_t self = slots[row], length = lengths[self];
        const int32_t *own = tokens + self * width;
        counts[row] = matched[row] = 0;
        if (limits[row] < 1) continue;
        Matches found = {.length = least, .count = 0};
        find_suffix(own, 0, length - 1, length, own, length, most, &found);
        for (int64_t other = next[self]; other != self; other = next[other])
            find_suffix(tokens + other * width, begins[other], lengths[other] - 1, lengths[other], own, length, most,
                        &found);
        if (!found.count) continue;
        int best = 0;
        for (int i = 1; i < found.count; i++)
            if (found.votes[i] > found.votes[best]) best = i;
        const int32_t *place = found.place[best];
        int64_t there = found.limit[best] - place, wanted = limits[row] < drafted ? limits[row] : drafted;
        int is_own = found.limit[best] == own + length; /* a match in the row itself can extend into its own draft */
        int64_t count = is_own || there > wanted ? wanted : there;
        for (int64_t i = 0; i < count; i++)
            drafts[row * drafted + i] = i < there ? place[i] : drafts[row * drafted + i - there];
        counts[row] = count;
        matched[row] = found.length;
    }
}
