/* The eval hook's hot half: filters asks, gathers routing ids, checks residency and logs touches.
 *
 * It enters Python only when a routing has a miss, when the log is full, when it was asked to be attentive, and at nodes
 * that it was told to seek. What it does is specified by PythonSeam in evalhook.py and held equal to it by
 * tests/native/test_evalhook.py.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#ifndef _WIN32
#define EXPORT __attribute__((visibility("default")))
#else
#define EXPORT __declspec(dllexport)
#endif

/* Mirrored by _SeamState in compiled.py, field by field. */
typedef struct {
    uint64_t name_offset, data_offset, ne_offset, nb_offset, src_offset; /* of struct ggml_tensor */
    const void *node;    /* the routing that Python is entered for */
    const void *awaited; /* weight whose product is isolated, because what follows it is still being read, or NULL */
    const char *sought;  /* name of the node at which a routing policy acts on the weights, or NULL */
    const int32_t *bank_of_layer;                            /* [n_layer], -1 = no routed experts */
    const int32_t *second_of_bank;                           /* [n_bank] the layer's second bank, -1 = none */
    const int64_t *key_base;                                 /* [n_bank] key of expert 0 */
    const int64_t *entry_base;                               /* [n_bank] index of expert 0 in resident */
    const int32_t *n_expert;                                 /* [n_bank] */
    const uint8_t *resident;                                 /* [n_entry] */
    uint32_t *stamp;                                         /* [n_entry] last generation that saw the entry */
    int64_t *log;                                            /* records of count, key, key, ... */
    bool (*route)(int32_t bank, int32_t count, const int64_t *keys, int32_t invalid);
    bool (*advance)(void); /* the product with the awaited weight was computed */
    bool (*weigh)(void);   /* the sought node was computed */
    int64_t log_length, log_capacity;
    int64_t asks, routings, entered;
    int32_t n_layer;
    int32_t pending; /* second bank of the layer in progress, whose ids are still to come, or -1 */
    uint32_t generation;
    int32_t attentive; /* enter Python at every routing, hit or not */
    int32_t cut;       /* end the graph at its first routing, of which nobody hears */
    volatile int32_t latch; /* set from any thread: the decode ends at its next node */
} seam_state;

static int layer_of(const char *name) {
    /* "ffn_moe_topk-<digits>" up to the end of the name; anything else is another node */
    static const char prefix[] = "ffn_moe_topk-";
    const size_t n = sizeof prefix - 1;
    if (memcmp(name, prefix, 8) != 0 || memcmp(name + 8, prefix + 8, n - 8) != 0) return -1;
    int layer = 0;
    const char *c = name + n;
    if (*c == 0 || (*c == '0' && c[1])) return -1;
    for (; *c; c++) {
        if (*c < '0' || *c > '9' || layer > 65535) return -1;
        layer = layer * 10 + (*c - '0');
    }
    return layer;
}

EXPORT bool seam_abort(void *user) { return ((seam_state *) user)->latch != 0; }

EXPORT bool seam_eval(void *tensor, bool ask, void *user) {
    seam_state *s = user;
    if (s->latch) return false;
    const char *t = tensor;
    s->asks += ask;
    if (s->awaited) {
        const void *weight;
        memcpy(&weight, t + s->src_offset, sizeof weight);
        if (weight == s->awaited) {
            if (ask) return true;
            s->awaited = NULL;
            s->entered++;
            return s->advance();
        }
    }
    if (s->sought && memcmp(t + s->name_offset, s->sought, 8) == 0 && strcmp(t + s->name_offset, s->sought) == 0) {
        if (ask) return true;
        s->sought = NULL;
        s->node = tensor;
        s->entered++;
        return s->weigh();
    }
    int32_t bank = s->pending;
    if (bank >= 0 && memcmp(t + s->name_offset, " (copy)", 8) == 0) {
        /* a second bank's ids are a cast of the first's, and the cast of a node without a name has this one */
        if (ask) return true;
        s->pending = -1;
    } else {
        const int layer = layer_of(t + s->name_offset);
        if (layer < 0 || layer >= s->n_layer) return false;
        bank = s->bank_of_layer[layer];
        if (bank < 0) return false;
        const int32_t second = s->second_of_bank[bank];
        if (second >= 0 && s->pending == second) return false; /* the same choice, computed again for that cast */
        if (ask) return true;
        if (s->cut) return false;
        s->pending = second;
    }

    int64_t ne[2];
    uint64_t nb[2];
    const char *data;
    memcpy(ne, t + s->ne_offset, sizeof ne);
    memcpy(nb, t + s->nb_offset, sizeof nb);
    memcpy(&data, t + s->data_offset, sizeof data);
    s->routings++;

    const int64_t n_expert = s->n_expert[bank], entry = s->entry_base[bank], key = s->key_base[bank];
    const int64_t most = ne[0] * ne[1] < n_expert ? ne[0] * ne[1] : n_expert;
    if (s->log_capacity - s->log_length < most + 1) {
        /* make room; an answer alone is no proof of it, since an interrupt may have come before Python's first statement */
        if (!s->route(-1, 0, NULL, 0) || s->log_capacity - s->log_length < most + 1) return false;
    }
    int64_t *keys = s->log + s->log_length + 1;
    const uint32_t now = ++s->generation;
    int64_t count = 0;
    int32_t invalid = -1;
    bool hit = true;
    /* backwards, so that an expert is kept at its last use; reversed below */
    for (int64_t token = ne[1] - 1; token >= 0; token--) {
        for (int64_t slot = ne[0] - 1; slot >= 0; slot--) {
            int32_t id;
            memcpy(&id, data + token * nb[1] + slot * nb[0], sizeof id);
            if (id < 0 || id >= n_expert) {
                if (invalid < 0) invalid = id < 0 ? INT32_MAX : id;
                continue;
            }
            if (s->stamp[entry + id] == now) continue;
            s->stamp[entry + id] = now;
            hit &= s->resident[entry + id] != 0;
            keys[count++] = key + id;
        }
    }
    for (int64_t i = 0, j = count - 1; i < j; i++, j--) {
        const int64_t k = keys[i];
        keys[i] = keys[j];
        keys[j] = k;
    }
    if (hit && invalid < 0 && !s->attentive) {
        s->log[s->log_length] = count;
        s->log_length += count + 1;
        return true;
    }
    s->entered++;
    s->node = tensor;
    return s->route(bank, (int32_t) count, keys, invalid);
}

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_seam", "Hot half of the eval hook; its functions are called through ctypes.", -1,
    NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__seam(void) { return PyModule_Create(&module); }
