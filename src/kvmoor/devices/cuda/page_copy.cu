// Copies the pages of blocks between device tensors and slots in page-locked host memory, which the GPU reaches itself.
//
// An item of work is one piece (part of one page, piece_table.py) of one block (a row of the parameters, launches.py).
// Items go round among the warps of a launch in the order in which slots have them, so that neighbouring warps work on
// neighbouring host memory. There are two ways of copying a piece:
//
//   rows<N>  The lanes of a warp read N rows of 32 words each into registers, then write them. What limits a link with
//            1-2 us of latency is how many bytes are on their way (bandwidth x latency: about 100 KB for PCIe 5 x16),
//            and a warp has N x 512 of them. N is known to the compiler because registers cannot be indexed.
//   bulk     One lane of a warp has the copy unit of its multiprocessor move whole pieces into shared memory and out
//            again (compute capability 9.0). What is on its way takes neither registers nor instructions.
//
// Slots are accessed in whole 128-byte lines where the pages allow it, and all accesses are marked as streaming: what
// is copied should not push out of the caches what the engine has in them.

typedef unsigned int u32;
typedef unsigned long long u64;

// Can be given (-D) to measure others; see ld and st in the PTX ISA. Not ld.global.nc: the compiler may move such loads
// behind stores, and did so with one of eight, which then waits for the first to arrive.
#ifndef LOAD
#define LOAD "ld.global.L1::no_allocate"
#endif
#ifndef STORE
#define STORE "st.global.cs"
#endif

constexpr int NARROW_ROWS = 8;  // for words of less than 16 bytes; guessed

constexpr u32 DEVICE_TO_HOST = 1;
constexpr u32 HAS_ODD_PIECES = 2;  // some piece is not a whole number of aligned 16-byte words

struct Header {
    const uint4* pieces;  // [num_pieces], two words each, see unpack()
    u64 slots_base;
    u64* word;
    u64 sequence;  // 0: more of the job follows in other launches
    u32* ticket;
    u64* begin_time;  // null: not asked for
    u64* end_time;
    u32 num_pieces;
    u32 num_blocks;
    u32 blocks_per_chunk;
    u32 flags;
};

// Behind the header there is a row for each block: {slot, id, ..., id}, 1 + blocks_per_chunk numbers.
template <int NBYTES>
struct Parameters {
    Header header;
    int rows[(NBYTES - sizeof(Header)) / sizeof(int)];
};
static_assert(sizeof(Header) == 72 && sizeof(Parameters<4096>) == 4096 && sizeof(Parameters<32760>) == 32760,
              "launches.py packs them");

struct Piece {
    u64 start;
    u64 stride;
    u32 slot_offset;
    u32 nbytes;
    u32 chunk_index;
    u32 width_log2;
};

// A piece as it is loaded. Taking it apart waits for it, so that is left until it is needed. Volatile: it stays where
// it is written, among other loads, whose latency hides its own.
struct RawPiece {
    uint4 low, high;

    __device__ RawPiece(const Header& header, u32 index) {
        load(low, header.pieces + 2 * index);
        load(high, header.pieces + 2 * index + 1);
    }

    static __device__ void load(uint4& word, const uint4* address) {
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                     : "l"(address));
    }
};

__device__ Piece unpack(const RawPiece& raw) {
    const u64 start = raw.low.x | static_cast<u64>(raw.low.y) << 32;
    const u64 stride = raw.low.z | static_cast<u64>(raw.low.w) << 32;
    return {start, stride, raw.high.x, raw.high.y, raw.high.z, raw.high.w};
}

// The items of one worker of several, without a division for each.
struct Walk {
    u32 block, piece, block_step, piece_step, num_pieces;

    __device__ Walk(const Header& header, u32 worker, u32 num_workers)
        : block(worker / header.num_pieces),
          piece(worker % header.num_pieces),
          block_step(num_workers / header.num_pieces),
          piece_step(num_workers % header.num_pieces),
          num_pieces(header.num_pieces) {}

    __device__ void advance() {
        block += block_step;
        piece += piece_step;
        if (piece >= num_pieces) {
            piece -= num_pieces;
            ++block;
        }
    }
};

struct Copy {
    const char* source;
    char* target;
    u32 nbytes;       // 0: the page is left out
    u32 line_offset;  // where in a 128-byte line of the slot it begins
};

template <class P>
__device__ Copy locate(const P& parameters, u32 block, const Piece& piece) {
    const Header& header = parameters.header;
    const int* row = parameters.rows + block * (1 + header.blocks_per_chunk);
    const int id = row[1 + piece.chunk_index];
    const u64 slot = header.slots_base + (static_cast<u64>(static_cast<u32>(row[0])) << 12) + piece.slot_offset;
    const u64 page = piece.start + static_cast<u64>(id) * piece.stride;
    const bool to_host = header.flags & DEVICE_TO_HOST;
    return {reinterpret_cast<const char*>(to_host ? page : slot), reinterpret_cast<char*>(to_host ? slot : page),
            id < 0 ? 0 : piece.nbytes, static_cast<u32>(slot) % 128};
}

// ---- rows

// Accesses of 1 << WIDTH_LOG2 bytes. Whether they are wanted is part of the instruction: branches would part them.
template <int WIDTH_LOG2>
struct Access;

template <>
struct Access<4> {
    typedef uint4 Word;
    static __device__ void load_if(bool wanted, Word& word, const char* source) {
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p " LOAD ".v4.u32 {%0, %1, %2, %3}, [%4]; }"
                     : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w)
                     : "l"(source), "r"(static_cast<u32>(wanted)));
    }
    static __device__ void store_if(bool wanted, const Word& word, char* target) {
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p " STORE ".v4.u32 [%4], {%0, %1, %2, %3}; }"
                     :
                     : "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w), "l"(target), "r"(static_cast<u32>(wanted))
                     : "memory");
    }
};

#define ACCESS(WIDTH_LOG2, REGISTER, CONSTRAINT, TYPE)                                                     \
    template <>                                                                                            \
    struct Access<WIDTH_LOG2> {                                                                            \
        typedef REGISTER Word;                                                                             \
        static __device__ void load_if(bool wanted, Word& word, const char* source) {                      \
            asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p " LOAD TYPE " %0, [%1]; }"              \
                         : "+" CONSTRAINT(word)                                                            \
                         : "l"(source), "r"(static_cast<u32>(wanted)));                                    \
        }                                                                                                  \
        static __device__ void store_if(bool wanted, const Word& word, char* target) {                     \
            asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p " STORE TYPE " [%1], %0; }"             \
                         :                                                                                 \
                         : CONSTRAINT(word), "l"(target), "r"(static_cast<u32>(wanted))                    \
                         : "memory");                                                                      \
        }                                                                                                  \
    };
ACCESS(3, u64, "l", ".u64")
ACCESS(2, u32, "r", ".u32")
ACCESS(1, unsigned short, "h", ".u16")
ACCESS(0, unsigned short, "h", ".u8")

// The whole warp copies. The first row is shorter where that makes the others begin on a line of the slot. While the
// last words are on their way, the next piece is looked up.
template <int ROWS, int WIDTH_LOG2>
__device__ void copy_rows(const Copy& copy, u32 lane, const Header& header, u32 next_index, RawPiece& next) {
    typedef Access<WIDTH_LOG2> Width;
    constexpr int ROW_NBYTES = 32 << WIDTH_LOG2;
    const u32 num_words = copy.nbytes >> WIDTH_LOG2;
    const u32 skew = (copy.line_offset >> WIDTH_LOG2) % 32;
    int word = static_cast<int>(lane - skew);  // below zero, so a large u32 below: not in the first row
    const char* source = copy.source + word * (1 << WIDTH_LOG2);
    char* target = copy.target + word * (1 << WIDTH_LOG2);
    u32 num_left = num_words + skew;
    bool is_last;
#pragma unroll 1
    do {
        typename Width::Word words[ROWS] = {};  // uninitialised, they would keep their registers all the time
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            Width::load_if(static_cast<u32>(word + 32 * row) < num_words, words[row], source + row * ROW_NBYTES);
        }
        is_last = num_left <= 32 * ROWS;
        if (is_last) next = RawPiece(header, next_index);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            Width::store_if(static_cast<u32>(word + 32 * row) < num_words, words[row], target + row * ROW_NBYTES);
        }
        word += 32 * ROWS;
        source += ROWS * ROW_NBYTES;
        target += ROWS * ROW_NBYTES;
        num_left -= 32 * ROWS;
    } while (!is_last);
}

template <class... Others>
__device__ void copy_narrow(u32 width_log2, Others&&... others) {
    switch (width_log2) {
        case 3: copy_rows<NARROW_ROWS, 3>(others...); break;
        case 2: copy_rows<NARROW_ROWS, 2>(others...); break;
        case 1: copy_rows<NARROW_ROWS, 1>(others...); break;
        default: copy_rows<NARROW_ROWS, 0>(others...);
    }
}

__device__ void copy_last_bytes(const Copy& copy, u32 width, u32 lane) {
    const u32 first = copy.nbytes & ~(width - 1);
    if (lane < copy.nbytes - first) copy.target[first + lane] = copy.source[first + lane];
}

template <int ROWS, class P>
__device__ void copy_by_rows(const P& parameters) {
    const Header& header = parameters.header;
    const u32 lane = threadIdx.x % 32;
    const u32 warps_per_block = blockDim.x / 32;
    Walk walk(header, blockIdx.x * warps_per_block + threadIdx.x / 32, gridDim.x * warps_per_block);
    RawPiece next(header, walk.piece);
#pragma unroll 1
    while (walk.block < header.num_blocks) {
        const Piece piece = unpack(next);
        const Copy copy = locate(parameters, walk.block, piece);
        walk.advance();
        if (piece.width_log2 == 4) {
            copy_rows<ROWS, 4>(copy, lane, header, walk.piece, next);
        } else {
            copy_narrow(piece.width_log2, copy, lane, header, walk.piece, next);
        }
        if (header.flags & HAS_ODD_PIECES) copy_last_bytes(copy, 1u << piece.width_log2, lane);
    }
}

// ---- bulk
#if __CUDA_ARCH__ >= 900

__device__ u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// A ring of stages in shared memory, which one lane fills and empties. Emptying is AHEAD stages behind filling: so many
// loads are on their way at any time, while the other stages are being written out.
template <int STAGES, int AHEAD, int STAGE_NBYTES>
struct Ring {
    static_assert(AHEAD < STAGES);
    static constexpr int WARPS = 4;  // each with a ring of its own

    struct Memory {
        alignas(128) char data[STAGES][STAGE_NBYTES];
        u64 loaded[STAGES];  // mbarriers
        char* target[STAGES];
        u32 nbytes[STAGES];
    };
    static constexpr int SHARED_NBYTES = WARPS * sizeof(Memory);

    Memory& memory;
    u32 num_loads = 0, num_stores = 0;

    __device__ explicit Ring(Memory& memory) : memory(memory) {
        for (int stage = 0; stage < STAGES; ++stage) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&memory.loaded[stage])));
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before the copy unit uses them
    }

    __device__ void load(const char* source, char* target, u32 nbytes) {
        const u32 stage = num_loads++ % STAGES;
        // The stage was last stored from STAGES loads ago, and STAGES - AHEAD - 1 stores have begun after that one.
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(STAGES - AHEAD - 1) : "memory");
        memory.target[stage] = target;
        memory.nbytes[stage] = nbytes;
        const u32 barrier = shared_address(&memory.loaded[stage]);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(nbytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :
                     : "r"(shared_address(memory.data[stage])), "l"(source), "r"(nbytes), "r"(barrier)
                     : "memory");
    }

    // Has to follow each load.
    __device__ void keep_up() {
        if (num_loads - num_stores > AHEAD) store();
    }

    __device__ void finish() {
        while (num_stores < num_loads) store();
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // not only read, but visible to this lane
    }

    __device__ void store() {
        const u32 stage = num_stores % STAGES;
        const u32 parity = num_stores++ / STAGES % 2;
        u32 is_loaded = 0;
        while (!is_loaded) {
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(is_loaded)
                         : "r"(shared_address(&memory.loaded[stage])), "r"(parity)
                         : "memory");
        }
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :
                     : "l"(memory.target[stage]), "r"(shared_address(memory.data[stage])), "r"(memory.nbytes[stage])
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
};

template <class R, class P>
__device__ void copy_in_bulk(const P& parameters) {
    extern __shared__ __align__(128) char shared[];
    const Header& header = parameters.header;
    const u32 lane = threadIdx.x % 32;
    const u32 warp = blockIdx.x * R::WARPS + threadIdx.x / 32;
    const u32 num_warps = gridDim.x * R::WARPS;
    if (lane == 0) {
        R ring(reinterpret_cast<typename R::Memory*>(shared)[threadIdx.x / 32]);
        Walk walk(header, warp, num_warps);
        RawPiece next(header, walk.piece);
#pragma unroll 1
        while (walk.block < header.num_blocks) {
            const Piece piece = unpack(next);
            const Copy copy = locate(parameters, walk.block, piece);
            walk.advance();
            const u32 nbytes = piece.width_log2 == 4 ? copy.nbytes & ~15u : 0;
            if (nbytes) ring.load(copy.source, copy.target, nbytes);
            next = RawPiece(header, walk.piece);
            ring.keep_up();
        }
        ring.finish();
    }
    __syncwarp();
    if (!(header.flags & HAS_ODD_PIECES)) return;
    Walk walk(header, warp, num_warps);
    RawPiece next(header, walk.piece);
#pragma unroll 1
    while (walk.block < header.num_blocks) {
        const Piece piece = unpack(next);
        const Copy copy = locate(parameters, walk.block, piece);
        walk.advance();
        if (piece.width_log2 == 4) {
            next = RawPiece(header, walk.piece);
        } else {
            copy_narrow(piece.width_log2, copy, lane, header, walk.piece, next);
        }
        copy_last_bytes(copy, 1u << piece.width_log2, lane);
    }
}

typedef Ring<5, 3, 2048> ShallowRing;
typedef Ring<8, 5, 4096> DeepRing;
static_assert(ShallowRing::SHARED_NBYTES == 41472 && DeepRing::SHARED_NBYTES == 132096, "launches.py asks for them");

#endif
// ---- around a launch

__device__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ void note_begin(const Header& header) {
    if (header.begin_time != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *header.begin_time = nanoseconds();
}

// The last thread block of a job's last launch says that the job is over. The writes of all threads come before their
// block's ticket, and all tickets before the completion word: who sees the word sees every byte, on the host as well.
__device__ void note_end(const Header& header) {
    __threadfence_system();
    if (header.sequence == 0) return;
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence_system();  // for the other threads' writes too, which the barrier ordered before this one's ticket
    // atomicInc goes back to zero with the last block, so that the ticket is ready for the next launch.
    if (atomicInc(header.ticket, gridDim.x - 1) != gridDim.x - 1) return;
    if (header.end_time != nullptr) *header.end_time = nanoseconds();
    __threadfence_system();
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(header.word), "l"(header.sequence) : "memory");
}

#define ENTRY(NAME, THREADS, NBYTES, ...)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ Parameters<NBYTES> p) { \
        note_begin(p.header);                                                                                  \
        __VA_ARGS__(p);                                                                                        \
        note_end(p.header);                                                                                    \
    }
#define VARIANT(NAME, THREADS, ...)                               \
    ENTRY(page_copy_##NAME##_small, THREADS, 4096, __VA_ARGS__)   \
    ENTRY(page_copy_##NAME##_large, THREADS, 32760, __VA_ARGS__)

VARIANT(rows4, 512, copy_by_rows<4>)
VARIANT(rows8, 512, copy_by_rows<8>)
VARIANT(rows16, 512, copy_by_rows<16>)
#if __CUDA_ARCH__ >= 900
VARIANT(bulk, 128, copy_in_bulk<ShallowRing>)
VARIANT(bulk_deep, 128, copy_in_bulk<DeepRing>)
#endif
